"""Prompt sets that rankers are judged by: tokens, and how long answers to them are.

count    the demo task; three answers of four stop early, as the model that it starts with does
errands  10 to 30 words, each costs what it costs; "k times" multiplies the next word; "briefly" and "in
         detail" scale the whole answer; an answer varies by 20 %
drift    512 errands again and again, each with a cost of its own that no word tells, while the policy
         changes: some answers grow from epoch to epoch, others shrink
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from producers.ranker.ranker import Answered, question_of
from schemas.importing import load_module

SAMPLES = 8  # of a group
_TASK = Path(__file__).parents[2] / "examples" / "count_task.py"
_CHARACTERS = " :" + string.digits + string.ascii_lowercase
_WORDS, _TIMES, _BRIEFLY, _IN_DETAIL = 400, 400, 420, 421  # tokens
_NOISE = 0.2


@dataclass(frozen=True)
class Asked:
    """A prompt, its answers, and their true mean length."""

    group: Answered
    mean: float


def count(number: int, rng: np.random.Generator) -> list[Asked]:
    """Prompts of the demo task."""
    task = load_module(str(_TASK))
    draw = random.Random(int(rng.integers(1 << 30)))
    found = []
    for place in range(number):
        target, word = task.draw_count(draw), task.draw_word(draw)
        tokens = [_CHARACTERS.index(letter) for letter in task.make_prompt(target, word)]
        said = np.where(rng.random(SAMPLES) < 0.25, target, rng.integers(1, target + 1, SAMPLES))
        mean = 4 + 3 * (0.25 * target + 0.75 * (target + 1) / 2)
        found.append(Asked(Answered(question_of(str(place), None, tokens), (4 + 3 * said).tolist()), mean))
    return found


def errands(number: int, rng: np.random.Generator) -> list[Asked]:
    """Prompts whose answers are long for many reasons."""
    return [
        _errand(str(place), tokens, cost, rng) for place, (tokens, cost) in enumerate(_texts(number, rng))
    ]


def drift(epochs: int, rng: np.random.Generator, number: int = 512) -> Iterator[list[Asked]]:
    """The same prompts, epoch by epoch, in ever another order."""
    texts = list(_texts(number, rng))
    own, slope = np.exp(rng.normal(0, 0.4, number)), rng.normal(0.1, 0.15, number)
    for epoch in range(epochs):
        yield [
            _errand(str(n), texts[n][0], texts[n][1] * own[n] * np.exp(slope[n] * epoch), rng)
            for n in rng.permutation(number).tolist()
        ]


def _errand(name: str, tokens: list[int], cost: float, rng: np.random.Generator) -> Asked:
    lengths = np.maximum(1, cost * np.exp(rng.normal(0, _NOISE, SAMPLES))).astype(int)
    return Asked(Answered(question_of(name, None, tokens), lengths.tolist()), cost)


def _texts(number: int, rng: np.random.Generator) -> Iterator[tuple[list[int], float]]:
    costs = np.exp(np.random.default_rng(5).normal(0, 1.3, _WORDS))
    for _ in range(number):
        tokens: list[int] = []
        total = 0.0
        for word in (_WORDS * rng.random(int(np.exp(rng.normal(2.5, 0.5))) + 3) ** 1.7).astype(int).tolist():
            times = int(rng.integers(2, 10)) if rng.random() < 0.15 else 1
            tokens += [_TIMES + times, word] if times > 1 else [word]
            total += times * costs[word]
        style = rng.random()
        if style < 0.2:
            tokens, total = [_BRIEFLY, *tokens], 0.4 * total
        elif style < 0.35:
            tokens, total = [*tokens, _IN_DETAIL], 2.5 * total
        yield tokens, 40 + 25 * total

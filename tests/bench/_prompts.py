"""Prompt sets that rankers are judged by: tokens, and how long answers to them are.

count    the demo task; three answers of four stop early, as the model that it starts with does
errands  10 to 30 words, each costs what it costs; "k times" multiplies the next word; "briefly" and "in
         detail" scale the whole answer; an answer varies by 20 %
filler   words that say nothing, and a few that each multiply the length by a factor of their own; an answer
         varies by 60 %. `Shape` says how many words there are and how many of them matter
errands among filler   the same errands, with three words of filler for each word
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
class Shape:
    """A kind of prompt made mostly of filler."""

    tokens: tuple[int, int]  # the fewest and the most of a prompt
    filler: float  # share of words that say nothing
    words: int  # number of different words that matter
    factor: float  # deviation of the log of a word's factor
    pairs: int = 0  # pairs of words that multiply the length once more if both are there


SHAPES = {
    "filler": Shape((66, 100), 0.85, 60, 0.25),
    "rare words": Shape((66, 100), 0.95, 200, 0.6),
    "pairs": Shape((66, 100), 0.93, 40, 0.3, pairs=40),
    "long": Shape((500, 2000), 0.98, 100, 0.4),
}
_FILLER_WORDS, _SPREAD = 3000, 0.6


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


def filler(shape: Shape, number: int, rng: np.random.Generator) -> list[Asked]:
    """Prompts of mostly filler."""
    factors = rng.normal(0, shape.factor, shape.words)
    pairs = rng.integers(0, shape.words, (shape.pairs, 2))
    beside = rng.normal(0, 2 * shape.factor, shape.pairs)
    found = []
    for place in range(number):
        tokens = _filler(int(rng.integers(*shape.tokens)), rng)
        matters = rng.random(len(tokens)) >= shape.filler
        tokens[matters] = rng.integers(0, shape.words, int(matters.sum()))
        there = np.isin(np.arange(shape.words), tokens[matters])
        mean = float(np.exp(5.5 + factors[there].sum() + beside[there[pairs].all(axis=1)].sum()))
        lengths = np.maximum(1, mean * np.exp(rng.normal(0, _SPREAD, SAMPLES))).astype(int)
        found.append(Asked(Answered(question_of(str(place), None, tokens.tolist()), lengths.tolist()), mean))
    return found


def errands_among_filler(number: int, rng: np.random.Generator) -> list[Asked]:
    """Errands with three words of filler for each word, between any two of them."""
    found = []
    for place, (errand, cost) in enumerate(_texts(number, rng)):
        tokens = _filler(4 * len(errand), rng)
        tokens[np.sort(rng.permutation(len(tokens))[: len(errand)])] = errand
        found.append(_errand(str(place), tokens.tolist(), cost, rng))
    return found


def _filler(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return words that say nothing, the first ones far more often than the last."""
    return 1000 + (_FILLER_WORDS ** rng.random(count)).astype(int)


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

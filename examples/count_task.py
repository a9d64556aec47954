"""Counting down with long tails: the prompt ``kzm 05:`` asks for ``kzm 05 04 03 02 01``.

How long an answer has to be follows from its prompt, and the lengths are heavy-tailed: half of
the answers count from one or two, a few from as far as seventy-two, which is 220 tokens for a
model that reads characters. So a batch of samples is mostly short with a long tail, as in real
post-training, while every answer can be checked exactly.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Iterator
from typing import Any

LONGEST = 72  # the largest number to count down from
SIZES = {"held_out": 1024, "train": 4096}  # in this order: see `problems`


def draw_count(rng: random.Random) -> int:
    """The number to count down from: clipped Pareto, median 2, mean about 4."""
    return min(LONGEST, int(1.2 * rng.paretovariate(1.25)))


def draw_word(rng: random.Random) -> str:
    """Three letters to begin with: they make enough different prompts of the short counts."""
    return "".join(rng.choices(string.ascii_lowercase, k=3))


def make_prompt(count: int, word: str) -> str:
    return f"{word} {count:02d}:"


def make_answer(count: int, word: str) -> str:
    return " ".join([word, *(f"{number:02d}" for number in range(count, 0, -1))])


def _draw(rng: random.Random) -> Iterator[tuple[int, str]]:
    """An endless stream of (count, word) with the counts as drawn and no pair twice."""
    seen: set[tuple[int, str]] = set()
    while True:
        count = draw_count(rng)
        pair = (count, draw_word(rng))
        while pair in seen:
            pair = (count, draw_word(rng))
        seen.add(pair)
        yield pair


def problems(split: str) -> Iterable[dict[str, Any]]:
    """The problems of one split, "train" or "held_out": always the same ones, in the same order.

    Both come from one stream without repeats, so they have no prompt in common.
    """
    if split not in SIZES:
        raise ValueError(f"unknown split {split!r}: it is one of {sorted(SIZES)}")
    pairs = _draw(random.Random(2024))
    for name, size in SIZES.items():
        for index in range(size):
            count, word = next(pairs)
            if name == split:
                yield {
                    "id": f"{split}-{index:05d}",
                    "prompt": make_prompt(count, word),
                    "answer": make_answer(count, word),
                    "kind": f"{count:02d}",  # prompts alike: their lengths predict one another
                }


def reward(problem: dict[str, Any], completion: str) -> dict[str, float]:
    """Two parts that add up to at most 1.

    `prefix` (up to 0.5) is partial credit: how much of the answer is right before the first
    mistake. Stopping early loses what is missing, and running on divides by what is too much.
    `exact` (0.5) is for the whole answer and nothing else.
    """
    wanted = problem["answer"].split(" ")
    written = completion.split(" ")
    right = 0
    while right < min(len(wanted), len(written)) and written[right] == wanted[right]:
        right += 1
    return {
        "prefix": 0.5 * right / max(len(wanted), len(written)),
        "exact": 0.5 * (completion == problem["answer"]),
    }

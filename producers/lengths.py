"""Predicted lengths and length classes. The predictor is a seam; this one goes by history."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Protocol


class LengthPredictor(Protocol):
    """Predicts how long answers to a prompt will be, and learns from those that came."""

    @property
    def version(self) -> str:
        """Which predictor, and what it has seen: every prompt record carries it."""

    def predict(self, problem: str, kind: str) -> float:
        """Expected length in tokens of an answer to a problem."""

    def observe(self, problem: str, kind: str, length: int) -> None:
        """An answer came to have this length."""


class HistoryPredictor:
    """What this prompt, then prompts like it, then all prompts produced so far.

    Means of log lengths (lengths are heavy-tailed), old ones fading, each level drawn towards the one above
    it as long as it has seen little. Prompts alike are those of one `kind`: the task's own word, or equal
    length.
    """

    _PRIOR = 2.0  # the level above weighs as much as so many observations
    _FADE = 0.98  # the policy drifts: an observation's weight after the next one of the same prompt

    def __init__(self, longest: int) -> None:
        self._start = math.log(max(2.0, longest / 8))
        self._levels: dict[str, tuple[float, float]] = {}
        self._seen = 0

    @property
    def version(self) -> str:
        return f"history/{self._seen}"

    def predict(self, problem: str, kind: str) -> float:
        estimate = self._start
        for level in ("all", f"kind:{kind}", f"problem:{problem}"):
            weight, total = self._levels.get(level, (0.0, 0.0))
            estimate = (total + self._PRIOR * estimate) / (weight + self._PRIOR)
        return math.exp(estimate)

    def observe(self, problem: str, kind: str, length: int) -> None:
        value = math.log(max(1, length))
        for level in ("all", f"kind:{kind}", f"problem:{problem}"):
            weight, total = self._levels.get(level, (0.0, 0.0))
            self._levels[level] = weight * self._FADE + 1.0, total * self._FADE + value
        self._seen += 1


def learn_edges(lengths: Sequence[int], classes: int) -> list[float]:
    """Edges that put equally many of these lengths into each class, as far as ties allow."""
    ordered = sorted(lengths)
    edges: list[float] = []
    for number in range(1, classes):
        edge = float(ordered[min(len(ordered) - 1, number * len(ordered) // classes)])
        edges.append(max(edge, edges[-1] + 1.0) if edges else edge)
    return edges


def class_of(length: float, edges: Sequence[float]) -> int:
    """The class of a length: how many edges it reaches."""
    return bisect.bisect_right(edges, length)

"""Curves through measured points: non-negative, growing with the batch, with the error that they leave.

A step of an engine       a curve of the batch, straight between its knots, + so much for each token that is
                          attended to, each that is prefilled, each sample that begins, each that ends, and
                          once if any sample begins
A call of the learner     so much for each micro-batch, each sample, each token, each token attended to

All coefficients are at least 0, so a curve never falls. Relative errors are made small.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flows.planning.nonnegative import nonnegative_fit
from schemas.profile import DecodePoint, TrainPoint

_LEAST_S = 1e-7  # of a step: no engine is faster
_KEPT = 8  # curves: a plan asks for those of one profile again and again
_LEAST_NOISE = 0.01  # relative: clocks and caches are no better than that


def relative_fit(columns: np.ndarray, seconds: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return the non-negative coefficients with the least squares of relative errors.

    `noise`: the standard error of each of the seconds. Two rounds: a point far off the first fit, as one that
    something else on the machine has spoiled, counts less in the second.
    """
    weight = 1.0 / np.hypot(_LEAST_NOISE * seconds, noise)
    scale = np.maximum(columns.max(axis=0), 1e-30)
    found = np.zeros(columns.shape[1])
    for _ in range(4):
        found = nonnegative_fit(columns / scale * weight[:, None], seconds * weight)
        wrong = np.abs(columns / scale @ found - seconds) / seconds
        typical = max(_LEAST_NOISE, float(np.median(wrong)) * 1.4826)
        weight = np.minimum(1.0, 3 * typical / np.maximum(wrong, 1e-12)) ** 0.5 / np.hypot(
            _LEAST_NOISE * seconds, noise
        )
    return found / scale


def relative_spread(expected: np.ndarray, seconds: np.ndarray, coefficients: int) -> float:
    """Return the relative standard deviation of points around a curve with so many coefficients."""
    wrong = (expected - seconds) / seconds
    return float(np.sqrt((wrong**2).sum() / max(1, len(wrong) - coefficients)))


@dataclass(frozen=True)
class DecodeCurve:
    """Seconds of an engine's step."""

    knots: tuple[float, ...]  # batches, ascending
    at_knots: tuple[float, ...]  # seconds at these, without context
    context_s: float
    prompt_s: float
    begun_s: float
    ended_s: float
    filled_s: float  # of a step in which any sample begins
    spread: float

    @classmethod
    def fitted(cls, points: Sequence[DecodePoint]) -> DecodeCurve:
        """Return the curve through all points that are not held out."""
        return _decode_curve(tuple(one for one in points if not one.held_out))

    @classmethod
    def _through(cls, used: Sequence[DecodePoint]) -> DecodeCurve:
        knots = _knots([one.samples for one in used])
        columns = np.array([[*_hinges(one.samples, knots), *_rest(one)] for one in used])
        seconds = np.array([one.seconds for one in used])
        found = relative_fit(columns, seconds, np.array([one.noise for one in used]))
        heights = [float(np.dot(_hinges(knot, knots), found[: len(knots)])) for knot in knots]
        spread = relative_spread(columns @ found, seconds, int((found > 0).sum()))
        context_s, prompt_s, begun_s, ended_s, filled_s = (float(one) for one in found[len(knots) :])
        return cls(tuple(knots), tuple(heights), context_s, prompt_s, begun_s, ended_s, filled_s, spread)

    def batch_s(self, samples: float) -> float:
        """Return the seconds of a step without context; beyond the last knot the curve goes on straight."""
        if samples > self.knots[-1] and len(self.knots) > 1:
            (left, right), (low, high) = self.knots[-2:], self.at_knots[-2:]
            return max(_LEAST_S, high + (high - low) / (right - left) * (samples - right))
        return max(_LEAST_S, float(np.interp(samples, self.knots, self.at_knots)))

    def seconds(self, point: DecodePoint) -> float:
        """Return the seconds of a step like a point's."""
        return max(_LEAST_S, self.batch_s(point.samples) + float(np.dot(
            (self.context_s, self.prompt_s, self.begun_s, self.ended_s, self.filled_s), _rest(point)
        )))  # fmt: skip


def _rest(point: DecodePoint) -> tuple[float, float, float, float, float]:
    return point.context, point.prompt, point.begun, point.ended, point.filled


def _knots(samples: Sequence[float]) -> list[float]:
    """Return batches at which a curve may bend: powers of 4, as far as there are points on both sides."""
    low, high = max(1.0, min(samples)), max(samples)
    inner = [4.0**power for power in range(1, 12) if low * 1.5 < 4.0**power < high / 1.5]
    return [low, *inner, high] if high > low else [low]


def _hinges(samples: float, knots: Sequence[float]) -> list[float]:
    """Return 1, and by how far the batch reaches into each part between two knots."""
    parts = [min(max(0.0, samples - low), high - low) for low, high in itertools.pairwise(knots)]
    if parts and samples > knots[-1]:
        parts[-1] += samples - knots[-1]
    return [1.0, *parts]


@dataclass(frozen=True)
class TrainCurve:
    """Seconds of a call of the learner."""

    micro_batch_s: float
    sample_s: float
    token_s: float
    context_s: float
    spread: float

    @classmethod
    def fitted(cls, points: Sequence[TrainPoint]) -> TrainCurve:
        """Return the curve through all points that are not held out."""
        return _train_curve(tuple(one for one in points if not one.held_out))

    @classmethod
    def _through(cls, used: Sequence[TrainPoint]) -> TrainCurve:
        columns = np.array([_amounts(one) for one in used], dtype=float)
        seconds = np.array([one.seconds for one in used])
        found = relative_fit(columns, seconds, np.array([one.noise for one in used]))
        spread = relative_spread(columns @ found, seconds, int((found > 0).sum()))
        micro_batch_s, sample_s, token_s, context_s = (float(one) for one in found)
        return cls(micro_batch_s, sample_s, token_s, context_s, spread)

    def seconds(self, point: TrainPoint) -> float:
        """Return the seconds of a call like a point's."""
        parts = (self.micro_batch_s, self.sample_s, self.token_s, self.context_s)
        return max(1e-9, float(np.dot(parts, _amounts(point))))


def _amounts(point: TrainPoint) -> tuple[float, float, float, float]:
    return point.micro_batches, point.samples, point.tokens, point.context


@lru_cache(maxsize=_KEPT)
def _decode_curve(points: tuple[DecodePoint, ...]) -> DecodeCurve:
    return DecodeCurve._through(points)


@lru_cache(maxsize=_KEPT)
def _train_curve(points: tuple[TrainPoint, ...]) -> TrainCurve:
    return TrainCurve._through(points)

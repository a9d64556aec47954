"""Analytic times, corrected by points that were measured.

log(measured / analytic) at the points ──► smooth in the logarithms of batch and context ──► factor, deviation

Far from all points the factor is 1 again, and as unsure as the analytic times are by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flows.planning.stage_times import EngineTimes, LearnerTimes
from schemas.profile import DecodePoint, TrainPoint

REACH = 3.0  # doublings of batch or context over which a measured ratio is carried
UNSURE = 0.35  # relative deviation of analytic times that don't say how unsure they are
_NOISE = 0.02  # relative, of a measured point, at least


@dataclass(frozen=True)
class SmoothRatio:
    """The ratio of measured to analytic seconds, anywhere: a Gaussian process of its logarithm."""

    places: np.ndarray  # [points, axes]: logarithms to base 2
    weights: np.ndarray
    inverse: np.ndarray
    unsure: float

    @classmethod
    def of(cls, places: np.ndarray, ratios: np.ndarray, noise: np.ndarray, unsure: float) -> SmoothRatio:
        """Return the smooth ratio through ratios at some places, each with its relative error."""
        kernel = _alike(places, places, unsure) + np.diag(np.maximum(_NOISE, noise) ** 2)
        inverse = np.linalg.inv(kernel)
        return cls(places, inverse @ np.log(ratios), inverse, unsure)

    def at(self, place: Sequence[float]) -> tuple[float, float]:
        """Return the ratio at a place, and its relative deviation."""
        near = _alike(np.array([place]), self.places, self.unsure)[0]
        left = self.unsure**2 - float(near @ self.inverse @ near)
        return math.exp(float(near @ self.weights)), math.sqrt(max(0.0, left))


def _alike(left: np.ndarray, right: np.ndarray, unsure: float) -> np.ndarray:
    distance = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(unsure**2 * np.exp(-distance / (2 * REACH**2)))


def corrected_engine(
    analytic: EngineTimes, points: Sequence[DecodePoint], *, context: float | None = None
) -> EngineTimes:
    """Return analytic times of an engine, as measured steps correct them.

    `context`: tokens that a sample attends to, on average, where the result is to be right; by default as in
    the points. Without points the result is the analytic times.
    """
    steps = [one for one in points if not one.begun]
    if not steps:
        return analytic
    unsure = analytic.spread or UNSURE
    ratio = SmoothRatio.of(
        np.array([_place(one.samples, one.context / one.samples) for one in steps]),
        np.array([one.seconds / _analytic(analytic, one) for one in steps]),
        np.array([one.noise / one.seconds for one in steps]), unsure,
    )  # fmt: skip
    typical = (
        context if context is not None else float(np.median([one.context / one.samples for one in steps]))
    )
    slots = analytic.slots
    slope, _ = ratio.at(_place(slots, 2 * typical))
    context_s = analytic.context_s * slope
    table, spreads = [], []
    for size in range(slots + 1):
        batch = max(1, size)
        factor, spread = ratio.at(_place(batch, typical))
        whole = (analytic.batch_s[size] + analytic.context_s * typical * batch) * factor
        table.append(max(analytic.batch_s[size] * factor * 0.1, whole - context_s * typical * batch))
        spreads.append(spread)
    begun = [one for one in points if one.begun and one.prompt]
    table = np.maximum.accumulate(table).tolist()
    found = replace(analytic, batch_s=tuple(table), context_s=context_s, spread=max(_NOISE, max(spreads)))
    return replace(found, prefill_s=_prefill(found, begun, unsure))


def _prefill(times: EngineTimes, points: Sequence[DecodePoint], unsure: float) -> float:
    """Return the seconds to prefill a token: the analytic ones where nothing was measured."""
    if not points:
        return times.prefill_s
    each = [
        max(1e-12, one.seconds - _analytic(replace(times, prefill_s=0.0), one)) / one.prompt for one in points
    ]
    found = float(np.median(each))
    if not times.prefill_s:
        return found
    deviation = max(_NOISE, float(np.std(np.log(each)))) / math.sqrt(len(each))
    share = unsure**2 / (unsure**2 + deviation**2)
    return float(times.prefill_s * (found / times.prefill_s) ** share)


def _analytic(times: EngineTimes, point: DecodePoint) -> float:
    batch = float(np.interp(point.samples, np.arange(len(times.batch_s)), times.batch_s))
    return max(1e-12, batch + times.context_s * point.context + times.prefill_s * point.prompt)


def _place(samples: float, context: float) -> tuple[float, float]:
    return math.log2(max(1.0, samples)), math.log2(1.0 + context)


def corrected_learner(
    analytic: LearnerTimes, points: Sequence[TrainPoint], *, tokens: float | None = None
) -> LearnerTimes:
    """Return analytic times of a learner, as measured calls correct them.

    `tokens`: of a micro-batch, where the result is to be right; by default as in the largest points.
    """
    if not points:
        return analytic
    unsure = analytic.spread or UNSURE

    def seconds(micro_batches: float, tokens: float) -> float:
        return max(1e-12, analytic.microbatch_s * micro_batches + analytic.token_s * tokens)

    ratio = SmoothRatio.of(
        np.array([[math.log2(one.tokens / one.micro_batches)] for one in points]),
        np.array([one.seconds / seconds(one.micro_batches, one.tokens) for one in points]),
        np.array([one.noise / one.seconds for one in points]), unsure,
    )  # fmt: skip
    large = tokens or max(one.tokens / one.micro_batches for one in points)
    factor, spread = ratio.at([math.log2(large)])
    small = large / 8
    part, _ = ratio.at([math.log2(small)])
    # the straight line through the corrected seconds of a small and of a large micro-batch
    low, high = seconds(1, small) * part, seconds(1, large) * factor
    token_s = max(0.0, (high - low) / (large - small))
    microbatch_s = max(0.0, high - token_s * large) if token_s else 0.0
    return replace(
        analytic, token_s=token_s or high / large, microbatch_s=microbatch_s, spread=max(_NOISE, spread)
    )

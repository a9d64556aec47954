"""Analytic times, corrected by points that were measured.

log(measured / analytic) at the points ──► smooth in log batch, context and devices ──► factor, deviation

Far from all points the factor is 1 again, and as unsure as the analytic times are by themselves. Points of an
engine on one device also correct the times of an engine on several: the less, the more doublings lie between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flows.planning.stage_times import EngineTimes, LearnerTimes
from schemas.profile import DecodePoint, TrainPoint

REACH = 3.0  # doublings of batch, context or devices over which a measured ratio is carried
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

    def at(self, places: np.ndarray, away: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Return the ratios at places, and their relative deviations.

        `away`: how far the places are from all points along one more axis, on which the points are alike.
        """
        near = _alike(places, self.places, self.unsure) * share_carried(away)
        left = self.unsure**2 - (near @ self.inverse * near).sum(axis=1)
        return np.exp(near @ self.weights), np.sqrt(np.maximum(0.0, left))


def share_carried(doublings: float) -> float:
    """Return how much of the logarithm of a measured ratio holds so many doublings away."""
    return math.exp(-(doublings**2) / (2 * REACH**2))


def _alike(left: np.ndarray, right: np.ndarray, unsure: float) -> np.ndarray:
    distance = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(unsure**2 * np.exp(-distance / (2 * REACH**2)))


def corrected_engine(
    analytic: EngineTimes, points: Sequence[DecodePoint], *, context: float | None = None,
    measured: EngineTimes | None = None, doublings: float = 0.0,
) -> EngineTimes:  # fmt: skip
    """Return analytic times of an engine, as measured steps correct them.

    `context`: tokens that a sample attends to, on average, where the result is to be right; by default as in
    the points. `measured`: analytic times of the engine that was measured, where it has other devices, and
    `doublings` from its number of devices to the one asked for. Without points nothing is corrected.
    """
    steps = [one for one in points if not one.begun]
    if not steps:
        return analytic
    unsure, there = analytic.spread or UNSURE, measured or analytic
    ratio = SmoothRatio.of(
        _places(
            np.array([one.samples for one in steps]), np.array([one.context / one.samples for one in steps])
        ),
        np.array([one.seconds / _analytic(there, one) for one in steps]),
        np.array([one.noise / one.seconds for one in steps]), unsure,
    )  # fmt: skip
    typical = (
        context if context is not None else float(np.median([one.context / one.samples for one in steps]))
    )
    sizes = np.maximum(1, np.arange(analytic.slots + 1))
    slope = ratio.at(_places(sizes[-1:], np.array([2 * typical])), doublings)[0][0]
    factors, spreads = ratio.at(_places(sizes, np.full(len(sizes), typical)), doublings)
    context_s = analytic.context_s * float(slope)
    alone = np.array(analytic.batch_s)
    whole = (alone + analytic.context_s * typical * sizes) * factors
    table = np.maximum.accumulate(np.maximum(alone * factors * 0.1, whole - context_s * typical * sizes))
    begun = [one for one in points if one.begun and one.prompt]
    prefill = _prefill_ratio(there, ratio, begun, unsure) ** share_carried(doublings)
    return replace(
        analytic, batch_s=tuple(table.tolist()), context_s=context_s,
        prefill_s=analytic.prefill_s * prefill, spread=max(_NOISE, float(spreads.max())),
    )  # fmt: skip


def _prefill_ratio(
    there: EngineTimes, ratio: SmoothRatio, points: Sequence[DecodePoint], unsure: float
) -> float:
    """Return the ratio of measured to analytic seconds of prefill: 1 where nothing was measured."""
    if not points or not there.prefill_s:
        return 1.0
    without = replace(there, prefill_s=0.0)
    places = _places(
        np.array([one.samples for one in points]), np.array([one.context / one.samples for one in points])
    )
    factors = ratio.at(places)[0]
    each = [
        max(1e-12, one.seconds - factor * _analytic(without, one)) / one.prompt
        for one, factor in zip(points, factors.tolist(), strict=True)
    ]
    found = float(np.median(each))
    deviation = max(_NOISE, float(np.std(np.log(each)))) / math.sqrt(len(each))
    share = unsure**2 / (unsure**2 + deviation**2)
    return float((found / there.prefill_s) ** share)


def _analytic(times: EngineTimes, point: DecodePoint) -> float:
    batch = float(np.interp(point.samples, np.arange(len(times.batch_s)), times.batch_s))
    return max(1e-12, batch + times.context_s * point.context + times.prefill_s * point.prompt)


def _places(samples: np.ndarray, context: np.ndarray) -> np.ndarray:
    return np.stack([np.log2(np.maximum(1.0, samples)), np.log2(1.0 + context)], axis=1)


def corrected_learner(
    analytic: LearnerTimes, points: Sequence[TrainPoint], *, tokens: float | None = None,
    measured: LearnerTimes | None = None, doublings: float = 0.0,
) -> LearnerTimes:  # fmt: skip
    """Return analytic times of a learner, as measured calls correct them.

    `tokens`: of a micro-batch, where the result is to be right; by default as in the largest points.
    `measured`: analytic times of the learner that was measured, where it has other devices, and `doublings`
    from its number of devices to the one asked for.
    """
    if not points:
        return analytic
    unsure, there = analytic.spread or UNSURE, measured or analytic
    ratio = SmoothRatio.of(
        np.array([[math.log2(one.tokens / one.micro_batches)] for one in points]),
        np.array([one.seconds / _call_s(there, one.micro_batches, one.tokens) for one in points]),
        np.array([one.noise / one.seconds for one in points]), unsure,
    )  # fmt: skip
    large = tokens or max(one.tokens / one.micro_batches for one in points)
    small = large / 8
    (part, factor), spreads = ratio.at(np.log2([[small], [large]]), doublings)
    # the straight line through the corrected seconds of a small and of a large micro-batch
    low, high = _call_s(analytic, 1, small) * float(part), _call_s(analytic, 1, large) * float(factor)
    token_s = max(0.0, (high - low) / (large - small))
    microbatch_s = max(0.0, high - token_s * large) if token_s else 0.0
    return replace(
        analytic, token_s=token_s or high / large, microbatch_s=microbatch_s,
        spread=max(_NOISE, float(spreads[1])),
    )  # fmt: skip


def _call_s(times: LearnerTimes, micro_batches: float, tokens: float) -> float:
    return max(1e-12, times.microbatch_s * micro_batches + times.token_s * tokens)

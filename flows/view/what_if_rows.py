"""The curves of a what-if as plain values, for `--json` and for tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from consumers.batches.reweighting import LEAST_SHARE
from consumers.what_if import CURVES, CurvePoint, WhatIfCurve

WhatIfRow = dict[str, Any]


def what_if_row(run: str, curves: Sequence[WhatIfCurve]) -> WhatIfRow:
    """Return all curves."""
    return {
        "run": run, "least_effective_share": LEAST_SHARE,
        "curves": [
            {
                "name": curve.name, "correction": curve.correction,
                "believable_until": curve.believable_until, "ended": curve.ended,
                "points": [point_row(point) for point in curve.points],
            }
            for curve in curves
        ],
    }  # fmt: skip


def point_row(point: CurvePoint) -> WhatIfRow:
    """Return one step of a curve; null stands for what is not known."""
    samples = point.samples
    return {
        "step": point.step, "iteration": point.iteration,
        "reward": _known(samples.reward), "reward_error": _known(samples.reward_error),
        "effective_samples": samples.of_samples, "effective_tokens": samples.of_tokens,
        "believable": samples.believable, "corrected": point.corrected,
        **{name: _known(point.metrics.get(name, math.nan)) for name in CURVES},
        "weights_apart": point.weights_apart, "root": point.root, "equal": point.equal,
        "as_expected": point.as_expected,
    }  # fmt: skip


def conclusion(curve: WhatIfCurve) -> str:
    """Return in words how far a curve can be believed."""
    first = curve.points[0].step if curve.points else None
    until, last = curve.believable_until, curve.points[-1].step if curve.points else None
    if first is None:
        said = "no step could be taken"
    elif until is None:
        said = f"not to be believed: at step {first} too few of the samples count"
    elif until == last:
        said = f"can be believed up to its last step, {last}"
    else:
        said = f"can be believed up to step {until}: from step {until + 1} on too few of the samples count"
    corrected = [point.step for point in curve.points if point.corrected]
    how = f"corrected from step {corrected[0]} on: {curve.correction}" if corrected else "none was corrected"
    return f"{said}{f'; it ends there: {curve.ended}' if curve.ended else ''} (samples: {how})"


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None

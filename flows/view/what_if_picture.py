"""Draws the curves of a what-if as small pictures, each with the run's own curve and the variants'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from consumers.batches.reweighting import LEAST_SHARE
from consumers.what_if import RECORDED, WhatIfCurve
from flows.view.what_if_rows import point_row

_PANELS = (
    ("reward", "reward, estimated (band: 2 standard errors)"),
    ("effective_samples", "effective samples, as a share"),
    ("effective_tokens", "effective tokens, as a share"),
    ("loss", "loss"),
    ("grad_norm", "gradient norm, before it is clipped"),
    ("entropy", "entropy, nats a token"),
    ("clip_fraction", "share of tokens held back by the clip"),
    ("divergence", "divergence from the reference"),
    ("logprob_drift", "drift of logprobs from those of the drawing weights"),
    ("weights_apart", "distance of the weights from the recorded ones"),
)
_SHARES = ("effective_samples", "effective_tokens")


def draw_what_if(title: str, curves: Sequence[WhatIfCurve], target: Path) -> None:
    """Draw the curves into the picture `target`. Steps that can't be believed are shaded and dotted."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot, ticker

    figure, grid = pyplot.subplots(4, 3, figsize=(15, 14), layout="constrained")
    figure.suptitle(title)
    colors = ["black", *(f"C{number}" for number in range(len(curves) - 1))]
    for axes, (name, words) in zip(grid.flat, _PANELS, strict=False):
        axes.set_title(words)
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        for curve, color in zip(curves, colors, strict=True):
            _line(axes, name, curve, color)
        if name in _SHARES:
            axes.set_ylim(-0.02, 1.05)
            axes.axhspan(-0.02, LEAST_SHARE, color="tab:red", alpha=0.15, linewidth=0)
    lines, names = grid.flat[0].get_legend_handles_labels()
    for axes in grid.flat[len(_PANELS) :]:
        axes.axis("off")
    grid.flat[len(_PANELS)].legend(
        lines, names, loc="center left", title="dotted: not to be believed", fontsize="small"
    )
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _line(axes: Any, name: str, curve: WhatIfCurve, color: str) -> None:
    """Draw one curve: solid as far as it can be believed, and dotted from there on."""
    rows = [point_row(point) for point in curve.points]
    until = curve.believable_until
    solid = [row for row in rows if until is not None and row["step"] <= until]
    dotted = rows[max(0, len(solid) - 1) :]  # joined to the solid line
    for part, style, label in ((solid, "o-", curve.name), (dotted, "o:", None)):
        known = [row for row in part if row[name] is not None]
        if not known and label is None:
            continue
        steps = [row["step"] for row in known]
        wide = curve.name == RECORDED  # so that it shows beneath a curve that has not come apart from it
        axes.plot(
            steps, [row[name] for row in known], style, color=color, label=label, markersize=3,
            linewidth=4 if wide else 1.2, alpha=0.35 if wide else 1.0,
        )  # fmt: skip
        if name == "reward":
            errors = [2 * (row["reward_error"] or 0.0) for row in known]
            low, high = (
                [row["reward"] + sign * one for row, one in zip(known, errors, strict=True)]
                for sign in (-1, 1)
            )
            axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    if name not in _SHARES:
        for row in rows:
            if not row["believable"]:
                axes.axvspan(row["step"] - 0.5, row["step"] + 0.5, color=color, alpha=0.06, linewidth=0)

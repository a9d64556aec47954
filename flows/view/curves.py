"""Draws the curves of a run as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.view.line_files import lines_of
from flows.view.metric_rows import MetricRow, Thinned
from schemas.metrics import REWARD_PART

_MOST_PARTS = 8  # more lines can't be told apart


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    lines: tuple[tuple[str, str], ...]  # key of the row, label


_PANELS = (
    _Panel("reward", (("reward", "training"),)),
    _Panel("length in tokens", (("length", "mean"), ("length_p50", "median"), ("length_max", "longest"))),
    _Panel("staleness in versions", (("staleness", "mean"), ("staleness_max", "largest"))),
    _Panel(
        "logprob gap, trainer to generator",
        (("logprob_gap", "largest, same weights"), ("logprob_drift", "mean, older weights")),
    ),
    _Panel("samples a second", (("samples_per_s", "trained"),)),
    _Panel("nats a token", (("entropy", "entropy"), ("divergence", "divergence from the reference"))),
    _Panel("gradient norm, before it is clipped", (("grad_norm", "norm"),)),
    _Panel(
        "share of tokens",
        (("clip_fraction", "held back by the loss's clip"), ("capped_fraction", "correction at its cap")),
    ),
    _Panel("loss", (("loss", "a step's loss"),)),
    _Panel("learning rate", (("learning_rate", "of the update"),)),
)


def draw(rows: Sequence[MetricRow], evaluations: Sequence[MetricRow], processes: Path, target: Path) -> None:
    """Draw the curves into the picture `target`. `processes`: the file with the notes of the processes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = [_PANELS[0], _parts(rows), *_PANELS[1:]]
    figure, grid = pyplot.subplots(4, 3, figsize=(15, 14), layout="constrained")
    for axes, panel in zip(grid.flat, panels, strict=False):
        axes.set_title(panel.title)
        axes.set_xlabel("optimizer step")
        for key, label in panel.lines:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if any(value for _, value in points):
                axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
    _add_evaluations(grid.flat[0], rows, evaluations)
    _draw_idle(grid.flat[-1], rows, processes)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _parts(rows: Sequence[MetricRow]) -> _Panel:
    """Return the panel of the rewards' parts: of the first ones, if there are many."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(REWARD_PART))
    lines = tuple((name, name.removeprefix(REWARD_PART)) for name in list(names)[:_MOST_PARTS])
    return _Panel("parts of the reward", lines)


def _add_evaluations(axes: Any, rows: Sequence[MetricRow], evaluations: Sequence[MetricRow]) -> None:
    """Add the held-out rewards, each at the last step that made its version."""
    step_of = {row["version"]: row["step"] for row in rows}
    points = [
        (step_of.get(row["version"], 0), row["reward"]) for row in evaluations if row["reward"] is not None
    ]
    if points:
        axes.plot(*zip(*points, strict=True), "o--", label="held-out", color="black")


def _draw_idle(axes: Any, rows: Sequence[MetricRow], processes: Path) -> None:
    axes.set_title("share of time spent waiting")
    axes.set_xlabel("optimizer step")
    axes.set_ylim(-0.02, 1.02)
    found: dict[str, Thinned[tuple[float, float]]] = {"trainer": Thinned()}
    # The steps' rows have the trainer's share; the notes of heartbeats have those of other processes.
    for row in rows:
        if row.get("idle") is not None:
            found["trainer"].add((row["step"] or 0, row["idle"] or 0))
    if processes.is_file():  # a long run has many notes, and some of them are enough
        for note in lines_of(processes):
            name, step, idle = note.get("process"), note.get("step"), note.get("idle")
            if isinstance(step, int) and isinstance(idle, int | float) and name != "trainer-0":
                found.setdefault(str(name), Thinned()).add((step, idle))
    for name, points in sorted(found.items()):
        if points.kept:
            axes.plot(*zip(*points.kept, strict=True), label=name, linewidth=1.2)

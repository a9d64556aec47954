"""Pictures of what benches found, as PNG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_COLOURS = ("#2563eb", "#d9480f", "#0d9373", "#8250df", "#c2255c")
_NEAR = 0.1  # the share that the band about equality is wide


@contextmanager
def drawn(file: Path, title: str, *, wide: float = 6.5, high: float = 6.0) -> Iterator[Any]:
    """Yield the axes of a picture, which is written in the end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(wide, high), layout="constrained")
    axes.set_title(title, fontsize=11, loc="left")
    try:
        yield axes
        figure.savefig(file, dpi=110)
    finally:
        pyplot.close(figure)


@dataclass(frozen=True)
class ChartPoint:
    """A figure as it was measured or published, and as it was predicted, with its range if there is one."""

    true: float
    said: float
    low: float | None = None
    high: float | None = None


def draw_pairs(file: Path, title: str, kinds: Mapping[str, Sequence[ChartPoint]], x: str, y: str) -> None:
    """Draw points about the line on which both are the same, with a band of a tenth on both sides."""
    from matplotlib import ticker

    with drawn(file, title) as axes:
        every = [one for points in kinds.values() for one in points]
        least = min(min(one.true, one.said) for one in every) / 1.2
        most = max(max(one.true, one.said) for one in every) * 1.2
        line = np.array([least, most])
        axes.fill_between(line, line * (1 - _NEAR), line * (1 + _NEAR), color="#e3e6ec", label="within 10 %")
        axes.plot(line, line, color="#6b7280", linewidth=0.8)
        for number, (kind, points) in enumerate(kinds.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            for one in points:
                if one.low is not None and one.high is not None:
                    axes.plot([one.true, one.true], [one.low, one.high], color=colour, linewidth=1.2)
            axes.scatter([one.true for one in points], [one.said for one in points], s=16, label=kind,
                         color=colour, alpha=0.8, linewidths=0)  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=(least, most), ylim=(least, most), xlabel=x, ylabel=y)
        for axis in (axes.xaxis, axes.yaxis):
            for which in (axis.set_major_formatter, axis.set_minor_formatter):
                which(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.tick_params(which="both", labelsize=8)
        axes.legend(fontsize=8, frameon=False)

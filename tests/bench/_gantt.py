"""Draws who ran what when: one panel a policy, one band a generator, as high as its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.bench._virtual import Span

_SHADES = ((0.5, "#9ecae1"), (0.8, "#4292c6"), (0.95, "#f16913"), (1.0, "#a63603"))  # by share of lengths
_NAMES = ("shorter half", "up to 80 %", "up to 95 %", "longest 5 %")
_MOMENTS = 400


def draw(traces: Mapping[str, Sequence[Span]], title: str, file: Path) -> None:
    """One picture of several policies."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    end = max(span.end for spans in traces.values() for span in spans)
    edges = [np.quantile([s.length for s in next(iter(traces.values()))], share) for share, _ in _SHADES]
    times = np.linspace(0, end, _MOMENTS)
    figure, panels = pyplot.subplots(
        len(traces), 1, sharex=True, figsize=(9, 2.2 * len(traces)), layout="constrained", squeeze=False
    )
    for panel, (name, spans) in zip(panels[:, 0], traces.items(), strict=True):
        generators = 1 + max(span.generator for span in spans)
        counts = np.zeros((generators, len(_SHADES), _MOMENTS))
        for span in spans:
            shade = int(np.searchsorted(edges, span.length))
            counts[span.generator, min(shade, 3)] += (times >= span.begin) & (times < span.end)
        high = counts.sum(axis=1).max()
        for generator in range(generators):
            base = np.full(_MOMENTS, float(generators - 1 - generator))
            for shade in reversed(range(len(_SHADES))):
                top = base + 0.9 * counts[generator, shade] / high
                label = _NAMES[shade] if generator == 0 and panel is panels[0, 0] else None
                panel.fill_between(times, base, top, color=_SHADES[shade][1], lw=0, label=label, step="post")
                base = top
        last = max(span.end for span in spans)
        panel.axvline(last, color="black", lw=0.8)
        panel.set_yticks([])
        panel.set_ylabel("generators")
        panel.set_title(f"{name}: {last:.0f} s", loc="left", fontsize=10)
    panels[0, 0].legend(loc="upper right", ncols=4, fontsize=8)
    panels[-1, 0].set_xlabel("seconds; the height of a band is the number of samples that run there")
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)

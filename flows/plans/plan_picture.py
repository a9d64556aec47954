"""Draws an iteration of a simulated run: the work of each process at each moment.

One band a generator, as high as its batch, coloured by how long each takes; the trainer and the links
above them. Only so many generators have bands of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flows.simulation.simulation_result import SimulatedSpan, Simulation

_SHADES = (
    (0.5, "#9ecae1", "shorter half"),
    (0.8, "#4292c6", "up to 80 %"),
    (0.95, "#f16913", "up to 95 %"),
    (1.0, "#a63603", "longest 5 %"),
)  # of samples, by the share that takes no longer
_COLOURS = {"training": "#31a354", "stepping": "#006d2c", "weights": "#756bb1"}
_NAMES = {"training": "trains", "stepping": "optimizer step", "weights": "weights on a link"}
_MOST_BANDS, _MOMENTS = 16, 500


def draw_plan(
    title: str, found: Simulation, iteration: int, places: Mapping[str, str], target: Path | Any, *,
    in_turns: bool = False,
) -> None:  # fmt: skip
    """Draw an iteration into a picture. `places`: by generator's lane, the machines on which it is.

    `in_turns`: engines rest while the learner works, with their samples unfinished.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    begin = found.steps[iteration - 1].ended_at if iteration else 0.0
    end = found.steps[iteration].ended_at
    margin = 0.04 * (end - begin)
    bars = _by_lane([one for one in found.spans if one.kind != "sample"])
    samples = _by_lane([one for one in found.spans if one.kind == "sample"])
    shown = _evenly(sorted(places), _MOST_BANDS)
    rows = [*shown[::-1], *sorted((lane for lane in bars if lane != "learner"), reverse=True), "learner"]
    figure, axes = pyplot.subplots(figsize=(11, 1.8 + 0.42 * len(rows)), layout="constrained")
    edges = np.quantile([one.end - one.begin for lane in samples.values() for one in lane] or [0.0],
                        [share for share, _, _ in _SHADES])  # fmt: skip
    times = np.linspace(begin - margin, end + margin, _MOMENTS)
    counts = {lane: _counts(samples.get(lane, ()), edges, times) for lane in shown}
    if in_turns:
        for bar in bars.get("learner", ()):
            for one in counts.values():
                one[:, (times >= bar.begin) & (times < bar.end)] = 0.0
    high = max([1.0, *(float(one.sum(axis=0).max()) for one in counts.values())])
    for row, lane in enumerate(rows):
        if lane in counts:
            _band(axes, row, counts[lane] / high, times)
            continue
        for bar in bars.get(lane, ()):
            first, last = max(bar.begin, times[0]), min(bar.end, times[-1])
            if last > first:
                axes.broken_barh([(first, last - first)], (row, 0.85), color=_COLOURS.get(bar.kind, "grey"))
    for edge in (begin, end):
        axes.axvline(edge, color="black", linewidth=0.9, linestyle="--")
    names = [
        f"{places[lane]}, generator {int(lane[1:]) + 1}" if lane in places else _lane(lane) for lane in rows
    ]
    axes.set_yticks([row + 0.42 for row in range(len(rows))], names, fontsize=9)
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(0, len(rows))
    more = len(places) - len(shown)
    axes.set_xlabel(
        f"virtual seconds; a generator's band is as high as its batch, at most {high:.0f} samples"
        + (f"; {more} more generators are not shown" if more else ""),
        fontsize=9,
    )
    axes.set_title(title, fontsize=11, loc="left")
    kinds = {bar.kind for lane in bars.values() for bar in lane}
    handles = [Patch(color=colour, label=f"sample, {name}") for _, colour, name in _SHADES]
    handles += [Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in _COLOURS if kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(target, dpi=110, format=None if isinstance(target, Path) else "png")
    pyplot.close(figure)


def _lane(name: str) -> str:
    return "trainer" if name == "learner" else name


def _by_lane(spans: Sequence[SimulatedSpan]) -> dict[str, list[SimulatedSpan]]:
    found: dict[str, list[SimulatedSpan]] = {}
    for one in spans:
        found.setdefault(one.lane, []).append(one)
    return found


def _evenly(lanes: Sequence[str], most: int) -> list[str]:
    """Return at most so many lanes, from the first to the last."""
    if len(lanes) <= most:
        return list(lanes)
    return [lanes[round(place)] for place in np.linspace(0, len(lanes) - 1, most)]


def _counts(spans: Sequence[SimulatedSpan], edges: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return how many samples run at each moment, by shade."""
    found = np.zeros((len(_SHADES), len(times)))
    for one in spans:
        shade = min(int(np.searchsorted(edges, one.end - one.begin)), len(_SHADES) - 1)
        found[shade] += (times >= one.begin) & (times < one.end)
    return found


def _band(axes: Any, row: int, counts: np.ndarray, times: np.ndarray) -> None:
    base = np.full(len(times), float(row))
    for shade in reversed(range(len(_SHADES))):
        top = base + 0.9 * counts[shade]
        axes.fill_between(times, base, top, color=_SHADES[shade][1], linewidth=0, step="post")
        base = top

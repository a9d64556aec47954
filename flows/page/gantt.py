"""The time of all processes as rows: each moment is filled with the causes that the time went to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from flows.page.axes import Axis
from flows.page.charts import note_of
from flows.page.safe_text import safe
from flows.page.time_use import ProcessTime, TimeUse
from schemas.messages import WAIT

COLUMNS, _HIGH = 320, 40
# by cause, the number of its colour in the style; unknown causes have one of their kind
_COLOURS = {
    "training": "w1", "generating": "w2", "generating the long tail": "w3", "stepping": "w4",
    "scoring": "w5", "scoring rewards": "w5", "recording": "w6", "publishing": "w7", "checkpointing": "w8",
    "installing weights": "w7", "fetching weights": "w7", "admitting": "w9", "taking steps again": "w10",
    "starting": "s1", "ended": "s2", WAIT + "samples": "b1", WAIT + "assignments": "b2",
    WAIT + "weights": "b3", WAIT + "optimizer steps": "b4", WAIT + "held-out samples": "b5",
    WAIT + "object store": "b6", WAIT + "the other's turn": "b8",
}  # fmt: skip


def colour_of(cause: str) -> str:
    """Return the class of a cause's colour."""
    return _COLOURS.get(cause, "b7" if cause.startswith(WAIT) else "w11")


def gantt_card(use: TimeUse, *, note: str = "") -> str:
    """Return the card with a row for each process, the legend, and the share of time that has a cause."""
    processes = [process for process in use.processes() if process.end > process.begin]
    if not processes:
        return _card('<p class="none">No process has said yet what its time goes to.</p>', note)
    begin, end = min(one.begin for one in processes), max(one.end for one in processes)
    edges = np.linspace(begin, end, COLUMNS + 1)
    totals: Counter[str] = Counter()
    rows = []
    for process in processes:
        totals.update(process.totals())
        rows.append(_row(process, edges))
    shares = [share for process in processes if (share := process.attributed()) is not None]
    said = f"{_least(min(shares))} of the time of every process has a cause" if shares else ""
    more = f"{use.left_out} more processes are not shown." if use.left_out else ""
    old = "Some notes are of an older version and have no causes." if use.unattributed else ""
    text = " ".join(filter(None, [f"{said}." if said else "", _READ, more, old, note]))
    return _card(_legend(totals) + "".join(rows) + _time_axis(begin, end), text)


_READ = (
    "Blue and green is work, red and yellow is waiting; the height of a colour is its share of that moment."
)


def _least(share: float) -> str:
    """Write a share so that it does not seem larger than it is."""
    return "100 %" if share >= 0.99995 else f"at least {int(share * 10_000) / 100:g} %"


def _card(body: str, note: str) -> str:
    head = 'Where the time went <span class="unit">each process, by cause</span>'
    return f'<figure class="card full gantt"><figcaption>{head}</figcaption>{body}{note_of(note)}</figure>'


def _row(process: ProcessTime, edges: np.ndarray) -> str:
    totals = process.totals()
    whole = sum(totals.values()) or 1.0
    largest = [
        f"{cause} {seconds / whole:.0%}"
        for cause, seconds in totals.most_common(3)
        if seconds / whole >= 0.005
    ]
    share = process.attributed()
    has = "" if share is None else f'<span class="share" title="time that has a cause">{_least(share)}</span>'
    return (
        f'<div class="row"><div class="who"><b>{safe(process.name)}</b>{has}</div>'
        f'<svg class="bars" viewBox="0 0 {COLUMNS} {_HIGH}" preserveAspectRatio="none" role="img" '
        f'aria-label="{safe(process.name)}">{_bars(process, edges)}</svg>'
        f'<div class="most">{safe(" · ".join(largest))}</div></div>'
    )


def _bars(process: ProcessTime, edges: np.ndarray) -> str:
    """Return a path for each cause, work at the bottom and waits at the top."""
    width, totals = float(edges[1] - edges[0]), process.totals()
    found = {cause: np.zeros(edges.size - 1) for cause in totals}
    for life in process.lives:
        for cause, seconds in life.columns(edges).items():
            found[cause] += seconds
    base, whole, parts = np.zeros(edges.size - 1), sum(totals.values()) or 1.0, []
    for cause in sorted(found, key=_order):
        share = np.clip(found[cause] / width, 0.0, 1.0 - base)
        title = f"{process.name} · {cause}: {totals[cause]:,.1f} s, {totals[cause] / whole:.1%}"
        if path := _stack(base, share):
            parts.append(f'<path class="{colour_of(cause)}" d="{path}"><title>{safe(title)}</title></path>')
        base = base + share
    return "".join(parts)


def _order(cause: str) -> tuple[bool, bool, str]:
    return cause.startswith(WAIT), cause in ("starting", "ended"), colour_of(cause)


def _stack(base: np.ndarray, share: np.ndarray) -> str:
    """Return rectangles on top of others; neighbours that are alike are one."""
    high = [round(float(value) * _HIGH, 1) for value in share]
    bottom = [round(_HIGH - float(value) * _HIGH, 1) for value in base]
    parts, column = [], 0
    while column < len(high):
        until = column + 1
        while until < len(high) and (high[until], bottom[until]) == (high[column], bottom[column]):
            until += 1
        if high[column] > 0:
            parts.append(f"M{column} {bottom[column]:g}h{until - column}v{-high[column]:g}H{column}z")
        column = until
    return "".join(parts)


def _legend(totals: Counter[str]) -> str:
    whole, names = sum(totals.values()) or 1.0, sorted(totals, key=_order)
    shown = [name for name in names if totals[name] / whole >= 0.001 and name != "ended"]
    items = [f'<span><i class="box {colour_of(name)}"></i>{safe(name)}</span>' for name in shown]
    return f'<div class="legend">{"".join(items)}</div>'


def _time_axis(begin: float, end: float) -> str:
    seconds = max(1e-3, end - begin)
    step, unit = next(
        (
            (size, unit)
            for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
            if seconds >= 3 * size
        ),
        (1.0, "s"),
    )
    marks: Sequence[float] = Axis(0.0, seconds / step, 0.0, 100.0).ticks(6)
    items = [
        f'<span style="left:{mark * step / seconds * 100:.2f}%">{mark:g}{f" {unit}" if mark else ""}</span>'
        for mark in marks if mark * step / seconds < 0.97
    ]  # fmt: skip
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin))
    ticks = f'<div class="ticks">{"".join(items)}</div>'
    return f'<div class="row times"><div class="who">since {since}</div>{ticks}</div>'

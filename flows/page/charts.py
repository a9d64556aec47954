"""Charts as SVG inside of HTML. Colours are variables of the page's style; all text is escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from flows.page.axes import Axis, axis_of, in_words
from flows.page.safe_text import safe

Point = tuple[float, float]
_WIDE = 1000
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 250, 50, 14, 10, 40


@dataclass(frozen=True)
class Curve:
    """A line of a chart, with a band around it: `low` and `high` for each point, or nothing."""

    label: str
    points: Sequence[Point]
    colour: int = 1
    band: Sequence[Point] = ()
    band_label: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Dots:
    """Single points of a chart, each with its error or None."""

    label: str
    points: Sequence[tuple[float, float, float | None]]
    colour: int = 2
    size: float = 3.5
    faint: bool = False


@dataclass(frozen=True)
class Limit:
    """A horizontal line that a chart's values should not cross."""

    label: str
    value: float


@dataclass(frozen=True)
class Chart:
    """A chart: its title, axes and all that is drawn."""

    title: str
    x_label: str
    lines: Sequence[Curve] = ()
    dots: Sequence[Dots] = ()
    limits: Sequence[Limit] = ()
    unit: str = ""
    note: str = ""
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False
    whole_x: bool = True  # x is a number of something
    x_range: tuple[float, float] | None = None  # that is shown at least
    wide: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it has no point."""
        return not any(one.points for one in self.lines) and not any(one.points for one in self.dots)


def chart_card(chart: Chart, empty: str = "Nothing is known of this yet.") -> str:
    """Return a chart with its title, legend and note."""
    kind = "card wide" if chart.wide else "card"
    unit = f' <span class="unit">{safe(chart.unit)}</span>' if chart.unit else ""
    body = f'<p class="none">{safe(empty)}</p>' if chart.is_empty else _legend(chart) + _pictures(chart)
    note = note_of(chart.note)
    return f'<figure class="{kind}"><figcaption>{safe(chart.title)}{unit}</figcaption>{body}{note}</figure>'


def note_of(text: str) -> str:
    """Return a paragraph below a chart. Names between backticks are set as code; empty for no text."""
    words = re.sub("`([^`]*)`", "<code>\\1</code>", safe(text))
    return f'<p class="note">{words}</p>' if text else ""


def _legend(chart: Chart) -> str:
    items = []
    for line in chart.lines:
        kind = "swatch dashed" if line.dashed else "swatch"
        label = f"{line.label} ({line.band_label})" if line.band and line.band_label else line.label
        items.append(f'<span class="k{line.colour}"><i class="{kind}"></i>{safe(label)}</span>')
    items += [
        f'<span class="k{one.colour}"><i class="dot"></i>{safe(one.label)}</span>' for one in chart.dots
    ]
    items += [
        f'<span class="limit"><i class="swatch dashed"></i>{safe(one.label)}</span>' for one in chart.limits
    ]
    return f'<div class="legend">{"".join(items)}</div>'


def _pictures(chart: Chart) -> str:
    """Return the SVG; of a wide chart another one, too, for a narrow screen, where its text would be tiny."""
    if not chart.wide:
        return picture_of(chart)
    return picture_of(chart, _WIDE, "chart broad") + picture_of(chart, _WIDTH, "chart narrow")


def picture_of(chart: Chart, width: float = _WIDTH, kind: str = "chart") -> str:
    """Return the chart's SVG, of a width in its own pixels."""
    height = _HEIGHT
    x, y = _axes(chart, width)
    inside = [_grid(chart, x, y), *(_band(line, x, y) for line in chart.lines)]
    inside += [_dots(one, x, y) for one in chart.dots if one.faint]
    inside += [_line(line, x, y) for line in chart.lines]
    inside += [_limit(one, x, y) for one in chart.limits if y.low <= one.value <= y.high]
    inside += [_dots(one, x, y) for one in chart.dots if not one.faint]
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="{safe(chart.title)}" '
        f'data-hover="{safe(_hover(chart, x))}">{"".join(inside)}'
        f'<line class="cross" x1="0" x2="0" y1="{_TOP}" y2="{height - _BOTTOM}"/></svg>'
    )


def _axes(chart: Chart, width: float) -> tuple[Axis, Axis]:
    xs, ys = [], []
    for line in chart.lines:
        xs += [at for at, _ in line.points]
        ys += [value for _, value in line.points]
        ys += [value for side in line.band for value in side]
    for dots in chart.dots:
        xs += [at for at, _, _ in dots.points]
        ys += [value + sign * (error or 0) for _, value, error in dots.points for sign in (-1, 1)]
    if ys:  # a limit far above all values would squeeze them
        near = max(ys) * (1e4 if chart.log_y else 1.6)
        ys += [one.value for one in chart.limits if min(ys) <= one.value <= near or not any(ys)]
    x = axis_of(xs, _LEFT, width - _RIGHT, log=chart.log_x)
    if not chart.log_x:
        xs += chart.x_range or ()
        low, high = min(xs), max(xs)
        x = Axis(low, high if high > low else low + 1, _LEFT + 4, width - _RIGHT - 4)
    return x, axis_of(ys, _HEIGHT - _BOTTOM, _TOP, log=chart.log_y, zero=chart.from_zero)


def _grid(chart: Chart, x: Axis, y: Axis) -> str:
    left, right, bottom = _LEFT, x.end + (0 if chart.log_x else 4), _HEIGHT - _BOTTOM
    parts = []
    for value in y.ticks(5):
        at = f"{y.at(value):.1f}"
        parts.append(f'<line class="grid" x1="{left}" x2="{right:.0f}" y1="{at}" y2="{at}"/>')
        parts.append(_text("tick", left - 7, y.at(value) + 4, "end", in_words(value)))
    for value in x.ticks(7):
        if chart.whole_x and value != int(value):  # there is no half step
            continue
        parts.append(_text("tick", x.at(value), bottom + 16, "middle", in_words(value)))
    parts.append(f'<line class="axis" x1="{left}" x2="{right:.0f}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(_text("label", (left + right) / 2, _HEIGHT - 6, "middle", chart.x_label))
    return "".join(parts)


def _text(kind: str, x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(text)}</text>'


def _path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    return "M" + "L".join(f"{x.at(at):.1f} {y.at(value):.1f}" for at, value in points)


def _line(line: Curve, x: Axis, y: Axis) -> str:
    if not line.points:
        return ""
    kind = f"line k{line.colour}" + (" dashed" if line.dashed else "")
    path = f'<path class="{kind}" d="{_path(line.points, x, y)}"/>'
    if len(line.points) > 40:
        return path
    radius = 3 if len(line.points) == 1 else 2.2
    marks = "".join(
        f'<circle class="mark k{line.colour}" cx="{x.at(at):.1f}" cy="{y.at(value):.1f}" r="{radius}"/>'
        for at, value in line.points
    )
    return path + ("" if line.dashed else marks)


def _band(line: Curve, x: Axis, y: Axis) -> str:
    if len(line.band) != len(line.points) or not line.points:
        return ""
    along = [at for at, _ in line.points]
    upper = [(at, high) for at, (_, high) in zip(along, line.band, strict=True)]
    lower = [(at, low) for at, (low, _) in zip(along, line.band, strict=True)]
    return f'<path class="band k{line.colour}" d="{_path([*upper, *lower[::-1]], x, y)}Z"/>'


def _limit(one: Limit, x: Axis, y: Axis) -> str:
    at = f"{y.at(one.value):.1f}"
    return f'<line class="limit" x1="{x.start:.0f}" x2="{x.end:.0f}" y1="{at}" y2="{at}"/>'


def _dots(dots: Dots, x: Axis, y: Axis) -> str:
    kind = f"k{dots.colour}" + (" faint" if dots.faint else "")
    parts = []
    for at, value, error in dots.points:
        px = f"{x.at(at):.1f}"
        if error:
            low, high = f"{y.at(value - error):.1f}", f"{y.at(value + error):.1f}"
            left, right = f"{x.at(at) - 4:.1f}", f"{x.at(at) + 4:.1f}"
            whisker = f"M{px} {low}V{high}M{left} {low}H{right}M{left} {high}H{right}"
            parts.append(f'<path class="error {kind}" d="{whisker}"/>')
        parts.append(f'<circle class="dot {kind}" cx="{px}" cy="{y.at(value):.1f}" r="{dots.size}"/>')
    return "".join(parts)


def _hover(chart: Chart, x: Axis) -> str:
    """Return the numbers that the page's script shows under the mouse."""
    series: list[tuple[str, int, Sequence[Sequence[float | None]]]] = [
        *((one.label, one.colour, one.points) for one in chart.lines),
        *((one.label, one.colour, one.points) for one in chart.dots if not one.faint),
    ]
    found = [
        {"n": label, "c": colour, "p": [[_round(part or 0) for part in point] for point in points]}
        for label, colour, points in series
        if points
    ]
    axis = {"l": x.low, "h": x.high, "s": x.start, "e": x.end, "log": x.log}
    return json.dumps({"x": axis, "u": chart.x_label, "s": found}, separators=(",", ":"))


def _round(value: float) -> float:
    return float(f"{value:.5g}")

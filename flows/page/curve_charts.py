"""The charts of a run's optimizer steps, lengths, weights and queues."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from flows.page.axes import in_bins
from flows.page.charts import Chart, Curve, Dots, Limit, Point
from schemas.metrics import METRICS, REWARD_PART, Metric
from schemas.runspec import RunSpec

_GAP_LIMITS = {"float32": 1e-3, "bfloat16": 0.15}  # as schemas.metrics says
_MOST_DOTS, _MOST_GENERATORS, _MOST_CLASSES, _MOST_METRICS = 800, 4, 8, 80
_STEP = "optimizer step"
# shown in charts of their own, or of no interest over time
_ELSEWHERE = {
    "step", "iteration", "version", "trainer_epoch", "finished_at", "ledger", "reward", "reward_deviation",
    "length", "length_p50", "length_max", "longest", "staleness", "staleness_max", "logprob_gap",
    "gap_tokens",    "samples_per_s", "entropy", "grad_norm",
}  # fmt: skip

Rows = Sequence[Mapping[str, Any]]


def points_of(rows: Rows, key: str, x: str = "step") -> list[Point]:
    """Return the points of one metric, in at most 200 bins."""
    found = [(row[x], row[key]) for row in rows if is_number(row.get(key)) and is_number(row.get(x))]
    return [(one.x, one.mean) for one in in_bins(found)]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of a file is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def hint(*names: str) -> str:
    """Return the values of metrics in a run that is well, as a sentence."""
    found = [(name, METRICS[name]) for name in names if name in METRICS and METRICS[name].healthy]
    return " ".join(
        f"In a run that is well: {one.healthy}." + (f" Otherwise: {one.otherwise}" if one.otherwise else "")
        for _, one in found
    )


def reward_chart(rows: Rows, evaluations: Rows, spec: RunSpec) -> Chart:
    """Draw rewards of training with their deviation, and of held-out problems with their standard errors."""
    usable = [row for row in rows if is_number(row.get("reward")) and is_number(row.get("step"))]
    means = [(row["step"], row["reward"]) for row in usable]
    spread = [(row["step"], _number(row.get("reward_deviation"))) for row in usable]
    points, wide = [(one.x, one.mean) for one in in_bins(means)], [one.mean for one in in_bins(spread)]
    band = [(value - by, value + by) for (_, value), by in zip(points, wide, strict=True)]
    training = Curve("training", points, 1, band, "± deviation of the samples")
    steps = spec.algorithm.optimizer_steps
    newest = {row["version"]: row for row in evaluations if is_number(row.get("reward"))}
    held_out = [
        (version * steps, row["reward"], row["reward_error"] if is_number(row.get("reward_error")) else None)
        for version, row in sorted(newest.items())
    ]
    dots = [Dots("held-out ± standard error", held_out, 2)] if held_out else []
    lines = [training]
    if len(held_out) > 1:
        lines.append(Curve("held-out", [(at, value) for at, value, _ in held_out], 2, dashed=True))
    return Chart("Reward", _STEP, lines if points else [], dots, wide=True, note=hint("reward"))


def _number(value: Any) -> float:
    return float(value) if is_number(value) else 0.0


def length_chart(rows: Rows, spec: RunSpec) -> Chart:
    """Draw mean, median and longest lengths."""
    lines = [
        Curve(label, points_of(rows, key), colour)
        for key, label, colour in (
            ("length_max", "longest", 3),
            ("length", "mean", 1),
            ("length_p50", "median", 4),
        )
    ]
    limit = Limit("sampling.max_tokens", spec.sampling.max_tokens)
    return Chart(
        "Length of answers",
        _STEP,
        lines,
        limits=[limit],
        unit="tokens",
        from_zero=True,
        note=hint("length_max"),
    )


def predicted_chart(
    lengths: Sequence[tuple[float, int]], edges: Sequence[float], last: Mapping[str, Any]
) -> Chart:
    """Draw predicted lengths against true ones: single samples, and the middle of them."""
    fine = sorted((max(1.0, said), max(1, true)) for said, true in lengths if is_number(said))
    every = max(1, len(fine) // _MOST_DOTS)
    dots = Dots("a sample", [(said, true, None) for said, true in fine[::every]], 1, 2.0, faint=True)
    middle, band = _quantiles(fine)
    lines = [Curve("median", middle, 2, band, "middle 80 %")] if middle else []
    if fine and (high := fine[-1][0]) > (low := fine[0][0]):
        lines.append(Curve("as predicted", [(low, low), (high, high)], 6, dashed=True))
    note = f"{len(fine)} samples of the newest steps." if fine else ""
    if fine and is_number(last.get("ranker_recall")):
        note += f" {last['ranker_recall']:.0%} of the longest fifth of the groups were expected to be so."
    if len(edges) and fine:
        inside = [f"{edge:.0f}" for edge in edges[:12]]
        note += f" Length classes end at {', '.join(inside)} tokens."
    return Chart("Length, predicted and true", "predicted tokens", lines, [dots] if fine else [],
                 unit="tokens", log_x=True, log_y=True, note=note)  # fmt: skip


def _quantiles(fine: Sequence[tuple[float, int]]) -> tuple[list[Point], list[Point]]:
    if len(fine) < 30:
        return [], []
    parts = np.array_split(np.array(fine), min(12, len(fine) // 15))
    middle = [(float(np.median(part[:, 0])), float(np.median(part[:, 1]))) for part in parts]
    band = [(float(np.quantile(part[:, 1], 0.1)), float(np.quantile(part[:, 1], 0.9))) for part in parts]
    kept = [number for number, (at, _) in enumerate(middle) if not number or at > middle[number - 1][0]]
    return [middle[number] for number in kept], [band[number] for number in kept]


def staleness_chart(rows: Rows, spec: RunSpec) -> Chart:
    """Draw how old the weights of samples are."""
    lines = [
        Curve("largest", points_of(rows, "staleness_max"), 3),
        Curve("mean", points_of(rows, "staleness"), 1),
    ]
    name = "staleness, rounded up" if spec.algorithm.order == "window" else "staleness_cap"
    limits = [Limit(f"algorithm.{name}", spec.algorithm.most_stale)]
    if spec.algorithm.mode != "async":
        limits = []
    return Chart(
        "Staleness", _STEP, lines, limits=limits, unit="versions", from_zero=True, note=hint("staleness_max")
    )


def gap_chart(rows: Rows, spec: RunSpec) -> Chart:
    """Draw how far generator and trainer disagree about logprobs."""
    tested = [row for row in rows if row.get("gap_tokens", 1) and _number(row.get("logprob_gap")) > 0]
    lines = [Curve("largest gap, same weights", points_of(tested, "logprob_gap"), 1)]
    limit = _GAP_LIMITS.get(spec.model.dtype)
    limits = [Limit(f"too much for {spec.model.dtype}", limit)] if limit else []
    steps = [row["step"] for row in rows if is_number(row.get("step"))]
    return Chart(
        "Logprob gap", _STEP, lines, limits=limits, unit="nats", log_y=True, note=hint("logprob_gap"),
        x_range=(steps[0], steps[-1]) if steps else None,
    )  # fmt: skip


def rate_chart(rows: Rows) -> Chart:
    """Draw how fast samples are trained."""
    lines = [Curve("trained", points_of(rows, "samples_per_s"), 1)]
    return Chart("Speed", _STEP, lines, unit="samples a second", from_zero=True)


def bytes_chart(notes: Rows) -> Chart:
    """Draw the bytes of each version of the weights, by the trainer's notes."""
    delta = [point for point in _per_version(notes, "published", "published_bytes") if point[0] > 0]
    whole = [(row["published"], row["whole_bytes"]) for row in notes
             if is_number(row.get("published")) and _number(row.get("whole_bytes")) > 0]  # fmt: skip
    lines = [Curve("to fetch", [(one.x, one.mean) for one in in_bins(delta)], 1)]
    if delta and whole:
        lines.append(Curve("all weights", [(one.x, one.mean) for one in in_bins(whole)], 6, dashed=True))
    mean = sum(value for _, value in delta) / len(delta) if delta else 0.0
    size = whole[-1][1] if whole else 0.0
    note = f"A version is {mean / size:.1%} of the weights, in the mean." if mean and size else ""
    return Chart(
        "Weights: bytes of a version", "version", lines if delta else [], unit="bytes", note=note,
        log_y=mean > 0 and size > 20 * mean, from_zero=True,
    )  # fmt: skip


def pause_chart(by_process: Mapping[str, Rows]) -> Chart:
    """Draw how long each generator stood still to install a version."""
    names = sorted(name for name in by_process if name.startswith("generator"))
    lines = []
    for number, name in enumerate(names[:_MOST_GENERATORS]):
        found = _per_version(by_process[name], "installs", "pause_s", x="version")
        lines.append(Curve(name, [(one.x, one.mean * 1000) for one in in_bins(found)], number + 1))
    note = (
        f"{len(names) - _MOST_GENERATORS} more generators are not shown."
        if len(names) > _MOST_GENERATORS
        else ""
    )
    return Chart("Weights: pause to install a version", "version", [line for line in lines if line.points],
                 unit="ms", from_zero=True, note=note)  # fmt: skip


def _per_version(notes: Rows, count: str, total: str, x: str = "") -> list[Point]:
    """Return, between two notes, the growth of a total by that of a count: the mean of those versions."""
    found: list[Point] = []
    before: Mapping[str, Any] | None = None
    for note in notes:
        if not all(is_number(note.get(key)) for key in (count, total, x or count)):
            continue
        if before is not None and before.get("pid") == note.get("pid") and note[count] > before[count]:
            grown = max(0.0, note[total] - before[total]) / (note[count] - before[count])
            found.append((float(note[x or count]), grown))
        if before is None or before.get("pid") != note.get("pid") or note[count] > before[count]:
            before = note
    return sorted(found)


def lag_chart(queues: Rows) -> Chart:
    """Draw, by length class, how many finished samples wait to be trained."""
    usable = [row for row in queues if is_number(row.get("at"))]
    classes, lines = max((len(row["lag"]) for row in usable), default=0), []
    for number in range(min(classes, _MOST_CLASSES)):
        found = [
            ((row["at"] - usable[0]["at"]) / 60, row["lag"][number])
            for row in usable
            if len(row["lag"]) > number and is_number(row["lag"][number])
        ]
        end = ", shortest" if not number else ", longest" if number == classes - 1 else ""
        points = [(one.x, one.mean) for one in in_bins(found)]
        lines.append(Curve(f"class {number}{end}", points, number % 6 + 1))
    note = "Finished samples that came after the newest trained one. A class that grows is left behind."
    return Chart(
        "Lag by length class", "minutes", lines, unit="samples", from_zero=True, whole_x=False,
        note=note if lines else "",
    )  # fmt: skip


def metric_chart(rows: Rows, key: str, title: str) -> Chart:
    """Draw one metric."""
    families = ((REWARD_PART, "reward_part_NAME"), ("tokens_class_", "tokens_class_N"))
    name = next((family for begin, family in families if key.startswith(begin)), key)
    known = METRICS.get(name, Metric("", ""))
    lines = [Curve(title, points, 1)] if (points := points_of(rows, key)) else []
    return Chart(title, _STEP, lines, unit=known.unit, note=f"{known.meaning} {hint(name)}".strip())


def metric_charts(rows: Rows, keys: Iterable[str]) -> list[Chart]:
    """Draw each other metric by itself."""
    charts = []
    for key in [key for key in keys if key not in _ELSEWHERE][:_MOST_METRICS]:
        chart = metric_chart(rows, key, key)
        if chart.lines and len({value for _, value in chart.lines[0].points}) > 1:
            charts.append(chart)
    return charts

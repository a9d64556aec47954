"""Tells how much a run takes besides decode steps and training, by the notes of a run that was made before.

processes.jsonl ──► processor seconds of feeder, generators and the publishing of weights, over time
                └─► seconds that the trainer records and publishes in

The processors' seconds grow with time and with the samples made: so much a second, and so much a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flows.planning.nonnegative import nonnegative_fit
from flows.planning.profiled_learner import ProfilingFailed
from flows.view.line_files import lines_of
from flows.view.process_notes import PROCESSES_FILE
from schemas.profile import OverheadsProfile

_WINDOW_S = 2.0
_LEAST = 8  # windows
_TRAINERS_OWN = ("recording", "publishing", "checkpointing", "wait: object store")

_Series = dict[str, list[tuple[float, float]]]  # by process: moments, and what was counted up to each


def overheads_of(folder: Path) -> OverheadsProfile:
    """Return the overheads in the notes of a run, by its report folder. Raises ProfilingFailed."""
    cpu, made, published, spent = _read(folder / PROCESSES_FILE)
    if not cpu or not made or not published:
        raise ProfilingFailed(
            f"{folder} has no notes of a run's feeder, generators and trainer ({PROCESSES_FILE}): name the "
            "report folder of a run, such as runs/count-1"
        )
    begin = max(series[0][0] for series in (*made.values(), *published.values()))
    end = min(series[-1][0] for series in (*cpu.values(), *made.values(), *published.values()))
    moments = np.arange(begin, end, _WINDOW_S)
    if len(moments) < _LEAST:
        raise ProfilingFailed(
            f"{folder}: the run made samples for {max(0.0, end - begin):.0f} s; to tell what its processes "
            f"took, {_LEAST * _WINDOW_S:.0f} s are needed"
        )
    used, samples = (_grown(series, moments) for series in (cpu, made))
    found = nonnegative_fit(np.column_stack([np.diff(moments), samples]), used)
    versions = float(_grown(published, moments).sum())
    own = float(_grown(spent, moments).sum())
    return OverheadsProfile(
        steady_cores=float(found[0]),
        sample_cpu_s=float(found[1]),
        iteration_s=own / max(1.0, versions),
        samples=round(float(samples.sum())),
        seconds=float(end - begin),
    )


def _read(file: Path) -> tuple[_Series, _Series, _Series, _Series]:
    """Return processor seconds, samples made, versions published, and seconds of the trainer's own."""
    cpu, made, published, spent = _Series(), _Series(), _Series(), _Series()
    for name, at, counters, causes in _notes(file):
        if name.startswith("feeder"):
            _add(cpu, name, at, counters.get("cpu_s"))
        elif name.startswith("generator"):
            _add(cpu, name, at, counters.get("cpu_s"))
            _add(made, name, at, counters.get("made"))
        elif name.startswith("trainer"):
            _add(cpu, name, at, counters.get("weights_cpu_s"))  # of its threads beside training
            _add(published, name, at, counters.get("published"))
            _add(spent, name, at, sum(_number(causes.get(cause)) for cause in _TRAINERS_OWN))
    return cpu, made, published, spent


def _notes(file: Path) -> Iterator[tuple[str, float, dict[str, Any], dict[str, Any]]]:
    for line in lines_of(file):
        at, counters, causes = line.get("at"), line.get("counters"), line.get("causes")
        if isinstance(at, float) and math.isfinite(at) and isinstance(counters, dict):
            yield str(line.get("process")), at, counters, causes if isinstance(causes, dict) else {}


def _add(series: _Series, name: str, at: float, value: object) -> None:
    """Add what was counted up to a moment. A count that falls is of a process that was started again."""
    if value is None:
        return
    points, number = series.setdefault(name, []), _number(value)
    if points and at <= points[-1][0]:
        return  # the same heartbeat again
    if points and number < points[-1][1]:
        points.clear()
    points.append((at, number))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _grown(series: _Series, moments: np.ndarray) -> np.ndarray:
    """Return by how much the sum over all processes grew from each moment to the next."""
    total = np.zeros(len(moments))
    for points in series.values():
        at, counted = np.array(points).T
        total += np.interp(moments, at, counted)
    return np.diff(total)

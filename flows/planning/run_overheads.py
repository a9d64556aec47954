"""Tells how much a run takes besides decode steps and training, by the notes of a run that was made before.

processes.jsonl ──► processor seconds of the trainer's machine, less those of engines and training, over time
                ├─► seconds that the trainer records and publishes in
metrics.jsonl ──┴─► processor seconds of engines and training, and how much was drawn and trained with them

Engines and learner need more processor seconds in a run than alone: processes take caches from each other.
All others need about the same however many samples are made: the more come, the more go into one message.
Where only some of a machine's cores may be used, those of feeder, generators and the publishing of weights
are counted instead: broker and Prefect server are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flows.planning.profiled_learner import ProfilingFailed
from flows.view.line_files import METRICS_FILE, lines_of
from flows.view.process_notes import PROCESSES_FILE
from schemas.profile import DrawnInRun, OverheadsProfile, TrainedInRun
from schemas.runspec import RunSpec

_LEAST_S = 16.0  # of a run that is looked at
_NEWEST = 4  # runs that are looked at
_BESIDE_TRAINING = ("stepping", "recording", "publishing", "checkpointing")
_TRAINERS_OWN = ("recording", "publishing", "checkpointing", "wait: object store")

_Series = dict[str, list[tuple[float, float]]]  # by process: moments, and what was counted up to each


def overheads_of(folder: Path) -> OverheadsProfile:
    """Return the overheads in the notes of a run, by its report folder. Raises ProfilingFailed."""
    notes = list(_notes(folder / PROCESSES_FILE))
    cpu, of_generators, computed, made, published, spent = _read(notes)
    if not cpu or not made or not published:
        raise ProfilingFailed(
            f"{folder} has no notes of a run's feeder, generators and trainer ({PROCESSES_FILE}): name the "
            "report folder of a run, such as runs/count-1"
        )
    begin = max(series[0][0] for series in (*made.values(), *published.values()))
    end = min(series[-1][0] for series in (*cpu.values(), *made.values(), *published.values()))
    if end - begin < _LEAST_S:
        raise ProfilingFailed(
            f"{folder}: the run made samples for {max(0.0, end - begin):.0f} s; to tell what its processes "
            f"took, {_LEAST_S:.0f} s are needed"
        )
    used, generators, work, samples, versions, own = (
        _grown(series, begin, end) for series in (cpu, of_generators, computed, made, published, spent)
    )
    return OverheadsProfile(
        steady_cores=max(0.0, used - work) / (end - begin),
        generator_cores=generators / (end - begin) / len(made),
        iteration_s=own / max(1.0, versions),
        samples=round(samples),
        seconds=float(end - begin),
        drawn=_drawn(notes, begin),
        trained=_trained(notes, folder / METRICS_FILE),
    )


def newest_overheads(spec: RunSpec) -> tuple[Path, OverheadsProfile] | None:
    """Return the newest run of a run file whose notes tell its overheads: its report folder, and these."""
    files = [
        (file.stat().st_mtime, file)
        for file in Path(spec.report).glob(f"{spec.run}-*/{PROCESSES_FILE}")
        if file.parent.name.removeprefix(f"{spec.run}-").isdecimal()
    ]
    for _, file in sorted(files, reverse=True)[:_NEWEST]:
        with suppress(ProfilingFailed):
            return file.parent, overheads_of(file.parent)
    return None


def _drawn(notes: Sequence[_Note], begin: float) -> DrawnInRun | None:
    """Return what the engines beside the trainer did since a moment, and their processor seconds."""
    names = ("work_s", "cpu_s", "tokens", "made", "slot_s", "busy_s")
    found = np.zeros(len(names))
    hosts = {one.host for one in notes if one.is_trainer}
    beside = {one.process for one in notes if one.process.startswith("generator") and one.host in hosts}
    for process in sorted(beside):
        mine = [one for one in notes if one.process == process and one.at >= begin and "made" in one.counters]
        if mine:
            found += np.maximum(0.0, _counted(mine[-1], names) - _counted(mine[0], names))
    work_s, own_s, tokens, samples, slots_s, busy_s = found.tolist()
    if min(work_s - own_s, tokens, samples, slots_s, busy_s) <= 0:
        return None
    return DrawnInRun(
        cpu_s=work_s - own_s, tokens=round(tokens), samples=round(samples), at_once=slots_s / busy_s
    )


def _trained(notes: Sequence[_Note], metrics: Path) -> TrainedInRun | None:
    """Return what the trainer did from the first note of a trained step to the last, and its seconds."""
    mine = [one for one in notes if one.is_trainer and "step" in one.counters]
    if not mine:
        return None
    first, last = (_number(one.counters["step"]) for one in (mine[0], mine[-1]))
    rows = [row for row in lines_of(metrics) if first < _number(row.get("step")) <= last]
    tokens, batches, groups = (
        sum(_number(row.get(name)) for row in rows)
        for name in ("trained_tokens", "microbatches", "informative_groups")
    )
    cpu_s = _number(mine[-1].counters.get("work_s")) - _number(mine[0].counters.get("work_s"))
    for counted, of in (("weights_cpu_s", "counters"), *((name, "causes") for name in _BESIDE_TRAINING)):
        before, after = (_number(getattr(one, of).get(counted)) for one in (mine[0], mine[-1]))
        cpu_s -= after - before
    before, after = (_number(one.causes.get("training")) for one in (mine[0], mine[-1]))
    if min(cpu_s, after - before, tokens, batches, groups) <= 0:
        return None
    return TrainedInRun(
        cpu_s=min(cpu_s, after - before),
        seconds=after - before,
        answer_tokens=round(tokens),
        groups=round(groups),
        micro_batches=round(batches),
    )


def _counted(note: _Note, names: Sequence[str]) -> np.ndarray:
    return np.array([_number(note.counters.get(name)) for name in names])


def _read(notes: Sequence[_Note]) -> tuple[_Series, ...]:
    """Return processor seconds of all and of generators, and those to leave out, samples made, versions, and
    the trainer's own seconds.

    The first ones are a whole machine's, if they can be: then the work of engines and trainer is left out.
    """
    cpu, of_generators, computed, made, published, spent = (_Series() for _ in range(6))
    here = next((one.host for one in notes if one.is_trainer and "machine_cpu_s" in one.counters), None)
    for one in notes:
        name, at, counters = one.process, one.at, one.counters
        if name.startswith("feeder") and here is None:
            _add(cpu, name, at, counters.get("cpu_s"))
        elif name.startswith("generator"):
            _add(made, name, at, counters.get("made"))
            if here is None or one.host == here:
                _add(of_generators, name, at, counters.get("cpu_s"))
                _add(computed, name, at, counters.get("work_s"))  # its own and its engine's
        elif one.is_trainer:
            _add(cpu, name, at, counters.get("weights_cpu_s"))  # of its threads beside training
            _add(computed, name, at, counters.get("work_s"))
            if here is not None:
                _add(cpu, "machine", at, counters.get("machine_cpu_s"))
            _add(published, name, at, counters.get("published"))
            _add(spent, name, at, sum(_number(one.causes.get(cause)) for cause in _TRAINERS_OWN))
    return cpu, of_generators, {} if here is None else computed, made, published, spent


@dataclass(frozen=True)
class _Note:
    """A heartbeat, as the notes have it."""

    process: str
    host: str
    at: float
    counters: Mapping[str, Any]
    causes: Mapping[str, Any]

    @property
    def is_trainer(self) -> bool:
        return self.process.startswith("trainer")


def _notes(file: Path) -> Iterator[_Note]:
    for line in lines_of(file):
        at, counters, causes = line.get("at"), line.get("counters"), line.get("causes")
        if isinstance(at, float) and math.isfinite(at) and isinstance(counters, dict):
            causes = causes if isinstance(causes, dict) else {}
            yield _Note(str(line.get("process")), str(line.get("host")), at, counters, causes)


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


def _grown(series: _Series, begin: float, end: float) -> float:
    """Return by how much the sum over all processes grew between two moments."""
    found = 0.0
    for points in series.values():
        at, counted = np.array(points).T
        before, after = np.interp((begin, end), at, counted)
        found += float(after - before)
    return found

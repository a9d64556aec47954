"""Measures an engine: decode steps by batch and context, prefill, and the answers to real prompts.

grid     samples × context, from prompts of a given length: what a step takes when nothing begins or ends
real     real prompts, a slot is filled as soon as it is free: what beginning and ending take, and lengths
held out other batches and contexts: how wrong the curves are that are fitted to the rest
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from producers.engines.engine import DrawnAnswer, SampleRequest
from producers.engines.remote_profile import ProfiledEngine
from producers.engines.step_timing import StepTable, TimedDraw
from producers.first_prompts import FirstPrompt
from schemas.identity import sample_id, sampling_seed
from schemas.profile import DecodePoint
from schemas.runspec import RunSpec

_WARM = 3  # steps after a prefill that are not counted: they use kernels for the first time
_MEASURED = 16  # steps of a point of the grid
_PREFILLS = 16  # steps in which a cell's prompts may be prefilled
_ALIKE = 12  # steps of real prompts that make up one point
_FAR = 4.0  # deviations beyond which a step is left out: something else had the machine


@dataclass(frozen=True)
class Cell:
    """A point of the grid."""

    samples: int
    context: int  # tokens of each sample before its first step
    held_out: bool = False


def grid(slots: int, longest: int, memory_tokens: int) -> list[Cell]:
    """Return the points to measure, those that say most first. `longest`: tokens of a sample.

    `memory_tokens`: that the KV cache holds; 0: not known.
    """
    steps = _most_steps(slots)
    short, long = 8, max(8, longest - steps)
    batches = sorted({1, slots, *(size for size in (4, 16, 64, 256, 1024, 4096) if size < slots)})
    between = [max(2, round((low * high) ** 0.5)) for low, high in itertools.pairwise(batches)]

    def fits(samples: int, context: int) -> bool:
        return not memory_tokens or samples * (context + steps) <= memory_tokens

    def longest_of(samples: int) -> int:
        return long if fits(samples, long) else max(short, memory_tokens // samples - steps)

    cells = [Cell(size, context) for size in (slots, 1, *batches[1:-1]) for context in (short, longest_of(size))]
    middle = [
        Cell(size, (short + longest_of(size)) // 2, held_out=True)
        for size in between
        if size not in batches
    ]
    return list(dict.fromkeys([*cells, *middle]))


def cell_order(cell: Cell, number: int, prompts: Sequence[FirstPrompt], spec: RunSpec, most_s: float) -> TimedDraw:
    """Return the order that measures a cell: prompts of as many tokens, which are repeated real ones."""
    tokens = list(itertools.chain.from_iterable(one.tokens for one in prompts))
    endless = itertools.cycle(tokens)
    requests = [
        SampleRequest(
            f"{number}-{index}", list(itertools.islice(endless, cell.context)),
            min(spec.sampling.max_tokens, _most_steps(cell.samples)), number * 100_003 + index, 0.0, endless=True,
        )
        for index in range(cell.samples)
    ]  # fmt: skip
    return TimedDraw(
        requests=requests, slots=cell.samples, most_s=most_s, most_steps=_most_steps(cell.samples)
    )


def _most_steps(samples: int) -> int:
    """Return the steps of a cell: a large one may need several for its prefill."""
    return _WARM + _MEASURED + 1 + min(samples, _PREFILLS)


def cell_points(table: StepTable, *, held_out: bool) -> list[DecodePoint]:
    """Return the points of a cell: its prefill, and its steps when nothing began."""
    begun = np.array(table.begun)
    quiet = np.flatnonzero((begun == 0) & (np.array(table.samples) > 0))[_WARM:]
    found = [point for point in (_point(table, quiet, held_out=held_out),) if point]
    full = np.flatnonzero(begun > 0)
    if len(full) and (point := _point(table, full, held_out=held_out)):
        found.append(point)
    return found


def real_points(table: StepTable) -> list[DecodePoint]:
    """Return points of a draw of real prompts: steps of about the same batch, in which samples come and go."""
    samples = np.array(table.samples)
    order = np.flatnonzero(samples > 0)
    order = order[np.argsort(samples[order], kind="stable")]
    parts = [order[at : at + _ALIKE] for at in range(0, len(order), _ALIKE)]
    every = max(1, len(parts) // 64)
    points = (_point(table, part, held_out=False) for part in parts[::every] if len(part) >= _ALIKE // 2)
    return [point for point in points if point]


def _point(table: StepTable, rows: np.ndarray, *, held_out: bool) -> DecodePoint | None:
    """Return the mean of some steps; None if there are none."""
    if not len(rows):
        return None
    seconds = np.array(table.seconds)[rows]
    middle, width = _middle(seconds)
    if width > 0 and len(rows) > 4:
        rows, seconds = (one[np.abs(seconds - middle) <= _FAR * width] for one in (rows, seconds))

    def mean(values: Sequence[int]) -> float:
        return float(np.mean(np.array(values)[rows]))

    return DecodePoint(
        samples=mean(table.samples), context=mean(table.context), begun=mean(table.begun),
        prompt=mean(table.prompt), ended=mean(table.ended), steps=len(rows),
        seconds=float(seconds.mean()), noise=_middle(seconds)[1] / len(seconds) ** 0.5, held_out=held_out,
    )  # fmt: skip


def _middle(seconds: np.ndarray) -> tuple[float, float]:
    """Return the median, and the standard deviation as the median distance from it tells."""
    middle = float(np.median(seconds))
    return middle, float(np.median(np.abs(seconds - middle))) * 1.4826


def real_requests(prompts: Sequence[FirstPrompt], spec: RunSpec) -> list[SampleRequest]:
    """Return requests for a group of answers to each prompt, with the seeds that a run would have."""
    size = spec.algorithm.group_size
    return [
        SampleRequest(
            sample_id(group, index), prompt.tokens, spec.sampling.max_tokens,
            sampling_seed(spec.seed, spec.run, prompt.name, group, index, 0, 0), float(spec.sampling.max_tokens),
        )
        for group, prompt in enumerate(prompts)
        for index in range(size)
    ]  # fmt: skip


@dataclass
class MeasuredEngine:
    """The measured points of an engine, and the answers that it drew to real prompts."""

    points: list[DecodePoint]
    answers: dict[str, DrawnAnswer]
    busy_cores: float
    disturbed: float


def measure_engine(
    engine: ProfiledEngine, prompts: Sequence[FirstPrompt], spec: RunSpec, seconds: float
) -> Iterator[float | MeasuredEngine]:
    """Measure an engine in about so many seconds. Yield the share that is done, and in the end the result."""
    slots = spec.generator.slots
    cells = grid(slots, spec.longest_sample, engine.memory_tokens)
    requests = real_requests(prompts, spec)
    each, points, tables = seconds / 2 / len(cells), list[DecodePoint](), list[StepTable]()
    # once before anything counts: kernels are chosen and memory is taken in the first steps
    engine.draw(cell_order(Cell(slots, 8), 10_000, prompts, spec, each))
    for number, cell in enumerate(cells):
        table, _ = engine.draw(cell_order(cell, number, prompts, spec, 2 * each))
        points += cell_points(table, held_out=cell.held_out)
        tables.append(table)
        yield (number + 1) / len(cells) / 2
    draw = TimedDraw(requests=requests, slots=slots, most_s=seconds / 2, most_steps=1_000_000)
    table, answers = engine.draw(draw)
    tables.append(table)
    points += real_points(table)
    waited, took = (sum(sum(getattr(one, name)) for one in tables) for name in ("waited", "seconds"))
    yield MeasuredEngine(
        points, {one.id: one for one in answers}, table.busy_cores, waited / max(1e-9, waited + took)
    )

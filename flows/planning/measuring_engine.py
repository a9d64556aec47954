"""Measures an engine: decode steps by batch and context, prefill, and the answers to real prompts.

grid     samples × context, from prompts of a given length: what a step takes when nothing begins or ends
real     real prompts, a slot is filled as soon as it is free: what beginning and ending take, and lengths;
         with fewer slots, too, for a plan may choose these
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
_MEASURED = 12  # steps of a point of the grid, each time that it is measured
_SHORT = 8  # tokens of a short prompt
_GRID, _FEW = 0.45, 0.15  # share of the time for the grid, and for real prompts with fewer slots
_BEGIN = 0.6  # share of the time for real prompts in which they begin: the longest answers need the rest
_PREFILL = 0.04  # share of the grid's time in which one point's prompts may be prefilled
_TURNS = 2  # of the grid
_FEW_PROMPTS = 16  # for each slot, where there are fewer slots
_PREFILLS = 16  # steps in which a cell's prompts may be prefilled
_ALIKE = 12  # steps of real prompts that make up one point
_FAR = 4.0  # deviations beyond which a step is left out: something else had the machine
_LOST = 0.9  # share of a step's time in which it waited for a core that leaves too little to measure
_SINGLE = 0.03  # relative deviation of single steps, at least: a point may have one alone
_CALM = 0.02  # share of a step's time in which it may have waited for a core


@dataclass(frozen=True)
class Cell:
    """A point of the grid."""

    samples: int
    context: int  # tokens of each sample before its first step
    held_out: bool = False


def grid(slots: int, longest: int, memory_tokens: int, most_tokens: int) -> list[Cell]:
    """Return the points to measure, those that say most first. `longest`: tokens of a sample.

    `memory_tokens`: that the KV cache holds; 0: not known. `most_tokens`: of the prompts of one point, as
    many as are prefilled in the time that there is.
    """
    steps = _most_steps(slots)
    short = min(_SHORT, max(1, longest - steps))
    batches = _batches(slots)
    between = [max(2, round((low * high) ** 0.5)) for low, high in itertools.pairwise(batches)]

    def longest_of(samples: int) -> int:
        held = memory_tokens // samples - steps if memory_tokens else longest
        return max(short, min(longest - steps, held, most_tokens // samples))

    cells = [
        Cell(size, context) for size in (slots, 1, *batches[1:-1]) for context in (short, longest_of(size))
    ]
    middle = [
        Cell(size, (short + longest_of(size)) // 2, held_out=True) for size in between if size not in batches
    ]
    return list(dict.fromkeys([*cells, *middle]))


def _batches(slots: int) -> list[int]:
    """Return the batches that are measured, ascending; the last one is all slots."""
    return sorted({1, slots, *(size for size in (4, 16, 64, 256, 1024, 4096) if size < slots)})


def cell_order(
    cell: Cell, number: int, prompts: Sequence[FirstPrompt], spec: RunSpec, most_s: float
) -> TimedDraw:
    """Return the order that measures a cell: prompts of as many tokens, which are repeated real ones."""
    tokens = list(itertools.chain.from_iterable(one.tokens for one in prompts))
    endless = itertools.cycle(tokens)
    requests = [
        SampleRequest(
            f"{number}-{index}", list(itertools.islice(endless, cell.context)),
            min(spec.sampling.max_tokens, _most_steps(cell.samples)), number * 100_003 + index, 0.0,
            endless=True,
        )
        for index in range(cell.samples)
    ]  # fmt: skip
    return TimedDraw(
        requests=requests, slots=cell.samples, most_s=most_s, most_steps=_most_steps(cell.samples)
    )


def _most_steps(samples: int) -> int:
    """Return the steps of a cell: a large one may need several for its prefill."""
    return _WARM + _MEASURED + 1 + min(samples, _PREFILLS)


def cell_points(tables: Sequence[StepTable], *, held_out: bool) -> list[DecodePoint]:
    """Return the points of a cell: its prefill, and its steps when nothing began."""
    quiet, full = [], []
    for table in tables:
        begun = np.array(table.begun)
        quiet.append(np.flatnonzero((begun == 0) & (np.array(table.samples) > 0))[_WARM:])
        full.append(np.flatnonzero(begun > 0))
    found = (_point(tables, rows, held_out=held_out) for rows in (quiet, full))
    return [point for point in found if point]


def real_points(table: StepTable) -> list[DecodePoint]:
    """Return points of a draw of real prompts, each of steps with about the same batch."""
    samples = np.array(table.samples)
    order = np.flatnonzero(samples > 0)
    order = order[np.argsort(samples[order], kind="stable")]
    parts = [order[at : at + _ALIKE] for at in range(0, len(order), _ALIKE)]
    every = max(1, len(parts) // 64)
    points = (_point([table], [part], held_out=False) for part in parts[::every] if len(part) >= _ALIKE // 2)
    return [point for point in points if point]


def _point(tables: Sequence[StepTable], rows: Sequence[np.ndarray], *, held_out: bool) -> DecodePoint | None:
    """Return the mean of some steps of each table; None if there are none.

    Steps that waited for a core are left out if there are enough others: their memory had left the caches.
    """

    def column(name: str) -> np.ndarray:
        return np.concatenate(
            [np.array(getattr(table, name), float)[some] for table, some in zip(tables, rows, strict=True)]
        )

    seconds, waited = column("seconds"), column("waited")
    usable = waited <= _LOST * (seconds + waited)
    if not usable.any():
        return None
    kept = waited <= _CALM * seconds
    if kept.sum() < max(4, len(seconds) // 4):
        kept = usable & (waited <= np.median(waited[usable]))
    middle, width = _middle(seconds[kept])
    if width > 0 and kept.sum() > 4:
        kept &= np.abs(seconds - middle) <= _FAR * width
    values = {
        name: float(column(name)[kept].mean()) for name in ("samples", "context", "begun", "prompt", "ended")
    } | {"filled": float((column("begun")[kept] > 0).mean())}
    seconds = seconds[kept]
    return DecodePoint(
        **values, steps=len(seconds), seconds=float(seconds.mean()),
        noise=max(_middle(seconds)[1], _SINGLE * float(seconds.mean())) / len(seconds) ** 0.5,
        held_out=held_out,
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
            sampling_seed(spec.seed, spec.run, prompt.name, group, index, 0, 0),
            float(spec.sampling.max_tokens),
        )
        for group, prompt in enumerate(prompts)
        for index in range(size)
    ]  # fmt: skip


class EngineMeasurement:
    """The measurement of an engine: turns of the grid, with a draw of real prompts between them.

    The turns are far apart, since a machine is faster in one minute than in another.
    """

    def __init__(
        self, engine: ProfiledEngine, prompts: Sequence[FirstPrompt], spec: RunSpec, seconds: float
    ) -> None:
        """`seconds`: about how long it takes in all."""
        self._engine, self._prompts, self._spec = engine, prompts, spec
        self._grid_s, self._few_s = _GRID * seconds, _FEW * seconds
        self._real_s = seconds - self._grid_s - self._few_s
        self._tables: dict[Cell, list[StepTable]] = {}
        self._few: list[StepTable] = []
        self._real = StepTable()
        self._turn = 0
        self._cells = grid(
            spec.generator.slots, spec.longest_sample, engine.memory_tokens, self._most_prompt_tokens()
        )

    def _most_prompt_tokens(self) -> int:
        """Draw before anything counts; return how many tokens of prompts a point may have.

        Kernels are chosen and memory is taken in the first steps. The second time says how fast prompts are
        prefilled.
        """
        spec = self._spec
        first = Cell(spec.generator.slots, min(_SHORT, spec.sampling.max_prompt_tokens))
        for number in range(2):
            order = cell_order(first, number, self._prompts, spec, self._grid_s / 8)
            warm, _ = self._engine.draw(order)
        begun = [(took, tokens) for took, tokens in zip(warm.seconds, warm.prompt, strict=True) if tokens]
        each_s = sum(took for took, _ in begun) / max(1, sum(tokens for _, tokens in begun))
        return round(_PREFILL * self._grid_s / max(1e-9, each_s))

    def turn(self) -> Iterator[float]:
        """Measure each point of the grid once, and real prompts with fewer slots. Yield the share done."""
        self._turn += 1
        most_s = 2 * self._grid_s / len(self._cells) / _TURNS + _PREFILL * self._grid_s
        for number, cell in enumerate(self._cells, start=1):
            order = cell_order(
                cell, 10 * self._turn * len(self._cells) + number, self._prompts, self._spec, most_s
            )
            table, _ = self._engine.draw(order)
            self._tables.setdefault(cell, []).append(table)
            yield number / (len(self._cells) + 1)
        sizes = [one for one in _batches(self._spec.generator.slots)[:-1] if one > 1]
        for size in sizes:
            few = TimedDraw(
                requests=real_requests(self._prompts[: _FEW_PROMPTS * size], self._spec), slots=size,
                most_s=self._few_s / len(sizes) / _TURNS, most_steps=1_000_000,
            )  # fmt: skip
            self._few.append(self._engine.draw(few)[0])
        yield 1.0

    def answers(self) -> dict[str, DrawnAnswer]:
        """Draw real prompts; return the answers."""
        requests = real_requests(self._prompts, self._spec)
        draw = TimedDraw(
            requests=requests, slots=self._spec.generator.slots, most_s=self._real_s, most_steps=1_000_000,
            begin_s=_BEGIN * self._real_s,
        )  # fmt: skip
        self._real, answers = self._engine.draw(draw)
        return {one.id: one for one in answers}

    def points(self) -> list[DecodePoint]:
        """Return all measured points."""
        found = [
            point
            for cell, some in self._tables.items()
            for point in cell_points(some, held_out=cell.held_out)
        ]
        return [*found, *itertools.chain.from_iterable(map(real_points, [*self._few, self._real]))]

    @property
    def turns_apart(self) -> tuple[float, ...]:
        """How long the first turn's steps of the grid took, and those of the others, over their mean."""
        whole = [some for some in self._tables.values() if all(one.seconds for one in some)]
        medians = np.array([[np.median(one.seconds) for one in some] for some in whole])
        return tuple(np.median(medians / medians.mean(axis=1, keepdims=True), axis=0)) if whole else ()

    @property
    def busy_cores(self) -> float:
        """The cores that the engine keeps busy while it draws."""
        return self._real.busy_cores

    @property
    def disturbed(self) -> float:
        """The share of the time in which it waited for a core."""
        every = [self._real, *self._few, *(one for some in self._tables.values() for one in some)]
        waited, took = (sum(sum(getattr(one, name)) for one in every) for name in ("waited", "seconds"))
        return min(1.0, waited / max(1e-9, waited + took))

"""Look up how groups were admitted: those in work when samples contradict each other, which is rare.

    partition of <run>.prompts    trained ….│….  groups in work  …│ end
                                            └─ found by bisection, then followed

All groups of an iteration are admitted before any iteration that is later by more than the staleness bound.
So no record before a group of iteration i is of an iteration after i + that bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

from msgspec import structs

from infra.bus import Reader, Record, clamp, read_until
from infra.gate import Gate, passed_over
from infra.roles.context import RoleContext
from infra.run_handle import RunHandle
from schemas.messages import TRAIN, Prompt


class Admitted:
    """Follows `<run>.prompts` from the oldest group in work on, once it was asked for a group."""

    def __init__(self, context: RoleContext) -> None:
        self._context, self._deadline = context, context.spec.deadlines.progress_s
        self._gate = Gate(Prompt, context.run, passed_over)  # the feeder and the generators report it
        self._reader: Reader | None = None
        self._found: dict[int, Prompt] = {}

    def groups(self, wanted: Collection[int], trained: int) -> dict[int, Prompt]:
        """Return the admitted prompts of these groups, none of which is of an iteration before `trained`."""
        topic = self._context.topics.prompts
        if self._reader is None:
            self._reader = reader = self._context.bus.reader(topic)
            clamp(reader)
            reader.seek(_Search(self._context, reader, self._gate).starts(trained))
        self._found = {group: one for group, one in self._found.items() if one.iteration >= trained}
        for record in read_until(self._reader, self._reader.end_offsets(), topic, deadline_s=self._deadline):
            prompt = self._gate.take_one(record)
            if prompt is not None and prompt.purpose == TRAIN and prompt.iteration >= trained:
                self._found.setdefault(prompt.group, _lean(prompt))  # of two the first, as for the feeder
        return {group: self._found[group] for group in wanted if group in self._found}

    def close(self) -> None:
        """Close the reader, if there is one."""
        if self._reader is not None:
            self._reader.close()


def _lean(prompt: Prompt) -> Prompt:
    """Return a copy with only the fields that samples are compared with; it does not hold the record."""
    return structs.replace(prompt, problem="", edges=[], tokens=prompt.tokens.copy())


class _Search:
    """Finds iterations on `<run>.prompts` by bisection."""

    def __init__(self, handle: RunHandle, reader: Reader, gate: Gate[Prompt]) -> None:
        self._handle, self._reader, self._gate = handle, reader, gate
        self._most_stale = int(handle.spec.algorithm.most_stale)

    def starts(self, iteration: int) -> dict[int, int]:
        """Return for each partition a position before all groups of iterations from this one on."""
        return self._first(iteration - self._most_stale - 1)

    def stops(self, iteration: int) -> dict[int, int]:
        """Return for each partition a position behind all groups of iterations up to this one."""
        return self._first(iteration + self._most_stale + 1)

    def _first(self, oldest: int) -> dict[int, int]:
        """Return positions such that all before is older, and what is there, if anything is, is not."""
        begins, ends = self._reader.begin_offsets(), self._reader.end_offsets()
        found = {}
        for partition, begin in begins.items():
            low, high = begin, ends[partition]  # all before `low` is older; what is at `high` is not
            while low < high:
                middle = (low + high) // 2
                at, iteration = self._iteration_at(ends, partition, middle, high)
                low, high = (at + 1, high) if iteration < oldest else (low, middle)
            found[partition] = low
        return found

    def _iteration_at(self, ends: dict[int, int], partition: int, start: int, stop: int) -> tuple[int, float]:
        """Return (position, iteration) of the next prompt for training; iteration `inf` if there is none.

        It may stand behind any number of others, such as those of an evaluation.
        """
        self._reader.seek(ends | {partition: start})
        topic, deadline_s = self._handle.topics.prompts, self._handle.spec.deadlines.progress_s
        for record in read_until(self._reader, {partition: stop}, topic, deadline_s=deadline_s):
            if record.partition != partition or not start <= record.offset < stop:
                continue
            if (iteration := self._iteration_of(record)) is not None:
                return record.offset, iteration
        return stop - 1, math.inf

    def _iteration_of(self, record: Record) -> int | None:
        prompt = self._gate.take_one(record)
        return prompt.iteration if prompt is not None and prompt.purpose == TRAIN else None


def admitted_prompts(
    handle: RunHandle, first: int, last: int, unfit: Callable[[Prompt], str]
) -> Iterator[Prompt]:
    """Yield the prompts for training of iterations `first` to `last` that log or archive has, each once.

    `unfit` says why one can't be of the run; empty if it can.
    """
    topic, sent = handle.topics.prompts, set[int]()
    reader, gate = handle.bus.reader(topic), Gate(Prompt, handle.run, passed_over, unfit=unfit)
    try:
        clamp(reader)
        search = _Search(handle, reader, gate)
        starts, stops = search.starts(first), search.stops(last)
        reader.seek(starts)
        for record in read_until(reader, stops, topic, deadline_s=handle.spec.deadlines.progress_s):
            prompt = gate.take_one(record) if record.offset < stops[record.partition] else None
            if prompt is None or prompt.purpose != TRAIN or prompt.group in sent:
                continue
            if first <= prompt.iteration <= last:
                sent.add(prompt.group)
                yield prompt
    finally:
        reader.close()

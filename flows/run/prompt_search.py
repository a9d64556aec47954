"""Finds the prompts of some samples in the log, which samples do not name by position.

A partition has its prompts in the order of admission, and a sample says when its group was admitted. So a
prompt is looked for by halves. Where a clock was set back, the whole partition is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from infra.bus import Fetcher, Record, read_until
from infra.errors import Explained
from infra.run_handle import RunHandle
from schemas.messages import Prompt, Sample
from schemas.topics import Topic
from schemas.wire import Unreadable, decode

_NAMED = 5


class PromptsGone(Explained):
    """Prompts that the log has no more; the message names groups and topic."""


def prompt_records(handle: RunHandle, topic: Topic, samples: Iterable[Sample]) -> list[Record]:
    """Return the records of the prompts of some samples, in order. Raises PromptsGone if one is missing."""
    wanted: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for one in samples:
        wanted[one.length_class][one.group] = one.admitted_at
    found: dict[int, Record] = {}
    reader = handle.bus.reader(topic)
    fetcher = handle.bus.fetcher()
    try:
        begins, ends = reader.begin_offsets(), reader.end_offsets()
        for part, groups in wanted.items():
            begin, end = begins.get(part, 0), ends.get(part, 0)
            search = _Search(handle, fetcher, topic, part)
            for group, admitted_at in groups.items():
                if (record := search.of(group, admitted_at, begin, end)) is not None:
                    found[group] = record
        left = {part: groups.keys() - found.keys() for part, groups in wanted.items()}
        found |= _scanned(handle, topic, {part: groups for part, groups in left.items() if groups})
    finally:
        fetcher.close()
        reader.close()
    missing = sorted(group for groups in wanted.values() for group in groups if group not in found)
    if missing:
        raise PromptsGone(
            f"{topic.name} has no prompt of {len(missing)} groups, such as "
            f"{', '.join(map(str, missing[:_NAMED]))}: retention has removed it "
            "(placement.kafka.retention_hours), and it is in no archive. A replay without rewards needs no "
            "prompts; a step file that was made earlier has them"
        )
    return sorted(found.values(), key=lambda one: (one.partition, one.offset))


def group_prompt(record: Record) -> Prompt | None:
    """Return the prompt in a record; None if it can't be read."""
    try:
        return decode(record.value, Prompt)
    except Unreadable:
        return None


class _Search:
    """Looks for prompts in one partition, by halves."""

    def __init__(self, handle: RunHandle, fetcher: Fetcher, topic: Topic, part: int) -> None:
        self._handle, self._fetcher, self._topic, self._part = handle, fetcher, topic, part
        self._known: dict[int, tuple[Record, Prompt]] = {}

    def of(self, group: int, admitted_at: float, begin: int, end: int) -> Record | None:
        low, high = begin, end
        while low < high:
            middle = (low + high) // 2
            one = self._at(middle)
            if one is None:
                return None
            if one[1].admitted_at < admitted_at:
                low = middle + 1
            else:
                high = middle
        while low < end and (one := self._at(low)) is not None and one[1].admitted_at == admitted_at:
            if one[1].group == group and self._is_mine(one[1]):
                return one[0]
            low += 1
        return None

    def _is_mine(self, prompt: Prompt) -> bool:
        return prompt.run == self._topic.name.rpartition(".")[0]

    def _at(self, offset: int) -> tuple[Record, Prompt] | None:
        if offset not in self._known:
            deadline_s = self._handle.spec.deadlines.progress_s
            came = self._fetcher.fetch(self._topic, {self._part: [offset]}, deadline_s=deadline_s)
            for (part, place), record in came.items():
                if part == self._part and (prompt := group_prompt(record)) is not None:
                    self._known[place] = record, prompt
        return self._known.get(offset)


def _scanned(handle: RunHandle, topic: Topic, wanted: dict[int, set[int]]) -> dict[int, Record]:
    found: dict[int, Record] = {}
    for part, groups in wanted.items():
        for record, prompt in _all(handle, topic, part):
            if prompt.group in groups:
                found.setdefault(prompt.group, record)
    return found


def _all(handle: RunHandle, topic: Topic, part: int) -> Iterator[tuple[Record, Prompt]]:
    reader = handle.bus.reader(topic, only=part)
    try:
        reader.seek(reader.begin_offsets())
        ends = reader.end_offsets()
        for record in read_until(reader, ends, topic, deadline_s=handle.spec.deadlines.progress_s):
            if (prompt := group_prompt(record)) is not None:
                yield record, prompt
    finally:
        reader.close()


def problems_by_group(records: Sequence[Record]) -> dict[int, str]:
    """Return the problems of prompts as JSON, by group."""
    return {one.group: one.problem for record in records if (one := group_prompt(record)) is not None}

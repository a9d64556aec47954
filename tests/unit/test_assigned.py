"""A generator takes what it is assigned: by name, from the log, and from nobody else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from infra.bus import Record, read_all
from infra.memory_bus import LARGEST_RECORD, MemoryBus, MemoryFetcher
from producers.assigned import Assigned, Work
from producers.dispatch.assigning import MOST_SAMPLES, assignments, question
from producers.dispatch.jobs import RecordPlace, SampleJob
from producers.stored import Stored
from schemas.messages import Assignment, DeadLetter, Prompt
from schemas.topics import Topic
from schemas.wire import decode, encode
from tests.factories import make_context, make_spec
from tests.unit.test_backlog import prompt
from tests.unit.test_on_the_way import part

SPEC = make_spec()


class Log:
    """The topics, and one generator that reads its assignments."""

    def __init__(self, folder: Path) -> None:
        self.context = make_context(SPEC, folder, role="generator")
        self.assigned = Assigned(self.context, "now")
        self._reader = self.context.bus.reader(self.context.topics.assignments)

    def job(self, group: int, index: int = 0, **fields: Any) -> SampleJob:
        """One whose prompt is on the log."""
        message = prompt(group, **fields)
        sent = self.context.writer.send(self.context.topics.prompts, encode(message), key=str(group))
        return SampleJob(message, index, place=RecordPlace(0, sent.offset()))

    def assign(self, *jobs: SampleJob, key: str | None = None, start: str = "now", **fields: Any) -> None:
        process = (self.context.name, start)
        withdrawn, moving = fields.pop("withdrawn", []), fields.pop("moving", [])
        found = list(assignments(self.context.run, process, jobs, [], [])) or [
            structs.replace(question(self.context.run, process), tell=False)
        ]
        for one in found:
            self.put(encode(structs.replace(one, withdrawn=withdrawn, moving=moving, **fields)), key)

    def put(self, value: bytes, key: str | bytes | None = None) -> None:
        raw = key if isinstance(key, bytes) else (key or self.context.name).encode()
        bus = self.context.bus
        assert isinstance(bus, MemoryBus)
        bus.append(self.context.topics.assignments, 0, raw, value)

    def work(self) -> list[Work]:
        return self.assigned.read(self._reader.poll(0.0))

    def letters(self) -> list[str]:
        records = read_all(self.context.bus, self.context.topics.dead, deadline_s=5)
        return [decode(record.value, DeadLetter).reason for record in records]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_prompts_are_fetched_from_where_they_stand(log: Log) -> None:
    jobs = [log.job(3, 1), log.job(5)]
    log.assign(*jobs, withdrawn=["0000009-00"], moving=["0000008-01"])
    (work,) = log.work()
    assert [(job.key, job.prompt) for job in work.jobs] == [(job.key, job.prompt) for job in jobs]
    assert (work.withdrawn, work.moving, work.tell) == (["0000009-00"], ["0000008-01"], False)
    assert not log.letters()


def test_what_is_for_others_is_passed_over_by_its_key(log: Log) -> None:
    """What it holds is not looked at, nor is a key that is no text."""
    log.put(b"garbage", "another")
    log.put(b"garbage", b"\xff\xfe")
    log.assign(log.job(1), key="another")
    log.assign(log.job(1), start="before")
    assert sum(len(work.jobs) for work in log.work()) == 0
    assert not log.letters()
    log.put(b"garbage")
    assert not log.work() and len(log.letters()) == 1


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (RecordPlace(0, 10**15), r"nothing stands at test-1.prompts\[0\]@1000000000000000"),
        (RecordPlace(0, -5), "nothing stands at"),
        (RecordPlace(30_000, 0), "nothing stands at"),
        (RecordPlace(-1, 0), "nothing stands at"),
        (
            RecordPlace(0, 1),
            r"sample 0 of group 77 does not fit .* of group 2, with 2 samples, at test-1.prompts\[0\]@1",
        ),
        (RecordPlace(0, 2), r"test-1.prompts\[0\]@2 can't be used: 3 bytes are too few"),
        (RecordPlace(0, 3), r"test-1.prompts\[0\]@3 can't be used: it is of run another"),
    ],
)
def test_a_sample_of_no_known_group_is_a_dead_letter_and_the_others_are_made(
    log: Log, place: RecordPlace, says: str
) -> None:
    good, other = log.job(1), log.job(2)
    log.context.writer.send(log.context.topics.prompts, b"bad", key="4")
    log.job(9, run="another")
    log.assign(good, SampleJob(prompt(77), 0, place=place), other)
    (work,) = log.work()
    assert [job.key for job in work.jobs] == [(1, 0), (2, 0)]
    (letter,) = log.letters()
    assert letter.startswith("1 of its 3 samples can't be made: ")
    assert __import__("re").search(says, letter), letter


def test_an_index_that_the_group_does_not_have_is_not_made(log: Log) -> None:
    log.assign(replace(log.job(1), index=2), replace(log.job(2), index=-1), log.job(3))
    assert [job.key for work in log.work() for job in work.jobs] == [(3, 0)]
    assert "2 of its 3 samples" in log.letters()[0]


@pytest.mark.parametrize(
    "name", ["", "x", "1", "1-", "-", "1-2-3", "12345678901234567890-01", "٣-٤", "1-99999999"]
)
def test_what_is_no_id_is_refused(log: Log, name: str) -> None:
    log.assign(log.job(1), withdrawn=[name])
    log.assign(log.job(1), moving=[name])
    assert not log.work()
    assert len(log.letters()) == 2 and all("is no sample's id" in letter for letter in log.letters())


def test_a_dispatcher_that_was_replaced_is_not_listened_to(log: Log) -> None:
    log.assign(log.job(1), epoch=1)
    log.put(encode(question(log.context.run, epoch=3)), "*")
    log.assign(log.job(2), epoch=2)
    log.assign(log.job(3), epoch=3)
    work = log.work()
    assert [job.key for one in work for job in one.jobs] == [(1, 0), (3, 0)]
    assert [one.tell for one in work] == [False, True, False]


def test_a_part_is_fetched_too_and_only_if_it_is_of_that_sample(log: Log) -> None:
    topic = log.context.topics.parts
    for message in (part(1), part(2), part(3, tokens=SPEC.sampling.max_tokens)):
        log.context.writer.send(topic, encode(message), key="k")
    log.context.writer.send(topic, b"bad", key="k")
    jobs = [replace(log.job(group), part_at=at) for group, at in ((1, 0), (4, 1), (3, 2), (5, 3), (6, 99))]
    log.assign(*jobs)
    (work,) = log.work()
    assert [job.part for job in work.jobs] == [part(1), None, None, None, None]
    assert not log.letters(), "it begins anew, and only time is lost"


class Counting(MemoryFetcher):
    """Counts what is asked of it."""

    asked = 0

    def fetch(
        self, topic: Topic, wanted: Mapping[int, Collection[int]], *, deadline_s: float
    ) -> dict[tuple[int, int], Record]:
        self.asked += sum(map(len, wanted.values()))
        return super().fetch(topic, wanted, deadline_s=deadline_s)


def test_what_was_fetched_is_kept_up_to_so_many_bytes(log: Log) -> None:
    context = log.context
    places = {log.job(group, problem="x" * 1000).place for group in range(20)} - {None}
    fetcher = Counting(context.bus)  # type: ignore[arg-type]
    stored = Stored(fetcher, context.topics.prompts, Prompt, context.run, most_bytes=8000, deadline_s=5)
    found = stored.get(places)  # type: ignore[arg-type]
    assert len(found) == fetcher.asked == 20 and all(isinstance(one, Prompt) for one in found.values())
    assert stored.bytes <= 8000
    stored.get([RecordPlace(0, 7)])
    asked = fetcher.asked
    stored.get([RecordPlace(0, 7)])
    assert fetcher.asked == asked


def test_assignments_are_cut_into_small_records_and_say_all() -> None:
    jobs = [
        SampleJob(prompt(group, size=16), index, place=RecordPlace(0, group))
        for group in range(600)
        for index in range(16)
    ]
    keys = [job.key for job in jobs]
    found = list(assignments("r", ("g", "1"), jobs, keys[:2500], keys[:100], epoch=4))
    assert len(found) == -(-len(jobs) // MOST_SAMPLES)
    assert max(len(encode(one)) for one in found) < LARGEST_RECORD // 64
    rows = [key for one in found for key in zip(one.groups.tolist(), one.indexes.tolist(), strict=True)]
    assert rows == keys
    assert len([name for one in found for name in one.withdrawn]) == 2500
    assert len([name for one in found for name in one.moving]) == 100
    assert {one.epoch for one in found} == {4}
    assert list(assignments("r", ("g", "1"), [], [], [])) == []


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_an_assignment_says_nothing_ends_and_no_sample_is_made_up(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    log = _LOGS.setdefault("log", Log(tmp_path_factory.mktemp("log")))
    if log.context.topics.prompts.name and not _LOGS.get("filled"):
        for group in range(4):
            log.job(group)
        _LOGS["filled"] = log
    count = data.draw(st.integers(0, 4))

    def numbers(low: int, high: int) -> list[int]:
        few = st.one_of(st.integers(0, 5), st.integers(low, high))
        return data.draw(st.lists(few, min_size=count, max_size=count))

    message = Assignment(
        run=log.context.run, generator=log.context.name, start="now",
        partitions=np.array(numbers(-(2**15), 2**15 - 1), np.int16),
        offsets=np.array(numbers(-(2**63), 2**63 - 1), np.int64),
        groups=np.array(numbers(-(2**63), 2**63 - 1), np.int64),
        indexes=np.array(numbers(-(2**15), 2**15 - 1), np.int16),
        parts=np.array(numbers(-(2**63), 2**63 - 1), np.int64),
        withdrawn=data.draw(st.lists(st.text(max_size=20), max_size=2)), moving=[], sent_at=0.0,
    )  # fmt: skip
    log.put(encode(message))
    for work in log.work():
        for job in work.jobs:
            assert 0 <= job.prompt.group < 4 and 0 <= job.index < 2


_LOGS: dict[str, Log] = {}

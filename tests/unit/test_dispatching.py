"""The dispatcher on the log: generators report, samples appear, and assignments follow."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.bus import Record
from infra.roles.context import RoleContext
from producers.dispatch import fleet
from producers.dispatch.board import Board
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import Placed, RecordPlace, SampleJob
from producers.dispatch.leaving import Leaving
from schemas.identity import sample_id
from schemas.messages import EVERYONE, Assignment, GeneratorReport, Part, Prompt
from schemas.topics import assignment_partition
from schemas.wire import decode, encode
from tests.dispatching import Dispatched
from tests.factories import make_context, make_sample, make_spec
from tests.fakes.fill import fill
from tests.unit.test_backlog import prompt
from tests.waiting import wait_until

SPEC = make_spec(dispatch={"silence_s": 1.0}, algorithm={"groups": 4, "group_size": 2})
PROMPTS = [  # those that `make_sample` makes samples of
    prompt(
        group, min_version=0, iteration=0, problem_id=str(group), tokens=np.array([4, 5], dtype=np.int32),
    )
    for group in range(4)
]  # fmt: skip


def placed(prompts: Sequence[Prompt]) -> list[Placed]:
    """As if they stood on the log."""
    return [Placed(prompt, RecordPlace(0, prompt.group)) for prompt in prompts]


class Instance:
    """A generator's side of the log."""

    def __init__(self, context: RoleContext, name: str, start: str, slots: int = 2) -> None:
        self._context, self.name, self.start, self._slots = context, name, start, slots
        self._reader = context.bus.reader(context.topics.assignments, only=assignment_partition(name))
        self.has: list[str] = []
        self.withdrawn: list[str] = []
        self.parts: dict[str, int] = {}  # offset of the part that each job came with
        self.asked = 0  # for all that it has

    def report(self, **fields: Any) -> None:
        keys = [(int(name[:-3]), int(name[-2:])) for name in self.has]
        values: dict[str, Any] = {
            "run": self._context.run, "generator": self.name, "start": self.start, "slots": self._slots,
            "batches": [1], "seconds": [0.01], "version": 0,
            "groups": np.array([key[0] for key in keys], np.int64),
            "indexes": np.array([key[1] for key in keys], np.int16),
            "tokens": np.full(len(keys), -1, np.int32), "returned": [], "leaving": False, "sent_at": 0.0,
        }  # fmt: skip
        report = GeneratorReport(**{**values, **fields})
        self._context.writer.send(self._context.topics.generators, encode(report), key=self.name)

    def look(self) -> list[str]:
        """What it was given by now."""
        for record in self._reader.poll(0.0):
            assignment = decode(record.value, Assignment)
            if assignment.tell and assignment.generator in (self.name, EVERYONE):
                self.asked += 1
            if assignment.generator != self.name or assignment.start != self.start:
                continue
            self.withdrawn += assignment.withdrawn
            rows = (assignment.groups.tolist(), assignment.indexes.tolist(), assignment.parts.tolist())
            for group, index, part in zip(*rows, strict=True):
                self.has.append(sample_id(group, index))
                self.parts[self.has[-1]] = part
        return self.has

    def hand_over(self, *names: str) -> None:
        """Publish the tokens of samples that are begun."""
        for name in names:
            part = fill(
                Part, run=self._context.run, group=int(name[:-3]), index=int(name[-2:]), tokens=np.arange(3),
                logprobs=np.zeros(3), version_starts=np.zeros(1), versions=np.zeros(1), roots=["r"],
                generator=self.name,
            )  # fmt: skip
            self._context.writer.send(self._context.topics.parts, encode(part), key=name)

    def finish(self, name: str) -> None:
        """Publish a sample."""
        self.has.remove(name)
        sample = make_sample(SPEC, int(name[:-3]), int(name[-2:]))
        self._context.writer.send(self._context.topics.samples, encode(sample), key=name)


def dispatching(context: RoleContext) -> Dispatched:
    return Dispatched(context, placed(PROMPTS))


def soon(condition: Callable[[], object], what: str, *alive: Instance) -> None:
    """Wait, while generators say that they are there."""

    def look() -> object:
        for generator in alive:
            generator.report()
        return condition()

    wait_until(look, what=what, deadline_s=20)


def test_the_only_one_gets_all_and_gives_back_what_another_can_begin(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    first, second = Instance(context, "a", "1"), Instance(context, "b", "1")
    with dispatching(context):
        soon(lambda: len(first.look()) == 8, "all for the only one", first)
        soon(lambda: first.look() and first.withdrawn, "a request to give back", first, second)
        returned = list(first.withdrawn)
        assert set(returned) < set(first.has)
        first.has = [name for name in first.has if name not in returned]
        first.report(returned=returned)
        soon(lambda: second.look(), "some of it for the other", first, second)
        assert set(second.has) <= set(returned)
        assert not set(second.has) & set(first.has)


@pytest.mark.parametrize("way", ["silence", "leaving", "a new start"])
def test_what_one_had_goes_to_who_is_there(tmp_path: Path, way: str) -> None:
    context = make_context(SPEC, tmp_path)
    first, second = Instance(context, "a", "1"), Instance(context, "b", "1", slots=8)
    with dispatching(context):
        soon(lambda: len(first.look()) == 8, "all for the only one", first)
        made = first.has[0]
        first.finish(made)
        soon(lambda: context.heart.counters["dispatched"] == 7, "the sample", first)
        lost = set(first.has)
        if way == "leaving":
            first.report(leaving=True)
        if way == "a new start":
            second = Instance(context, "a", "2", slots=8)
        soon(lambda: len(second.look()) == 7, "what the first one had", second)
        assert set(second.has) == lost
        assert len(second.has) == 7, "what is finished is not made again"


@pytest.mark.parametrize("parts", ["before", "after", "too few"])
def test_who_goes_on_gets_the_tokens_that_one_that_leaves_hands_over(tmp_path: Path, parts: str) -> None:
    context = make_context(SPEC, tmp_path)
    first, second = Instance(context, "a", "1", slots=2), Instance(context, "b", "1", slots=8)
    with dispatching(context):
        soon(lambda: len(first.look()) == 8, "all for the only one", first)
        begun = first.has[:2]
        if parts == "before":
            first.hand_over(*begun)
        first.report(leaving=True, handed=2)
        if parts != "before":
            first.hand_over(*(begun if parts == "after" else begun[:1]))
        soon(lambda: len(second.look()) == 8, "all for the second", second)
        expected = begun[:1] if parts == "too few" else begun
        assert {name: second.parts[name] for name in expected} == dict(zip(expected, (0, 1), strict=False))
        assert all(at == -1 for name, at in second.parts.items() if name not in expected)


def test_parts_of_one_that_does_not_leave_are_dropped_with_it() -> None:
    leaving, part = Leaving(2.0), fill(Part, generator="a", group=3, index=1)
    leaving.arrived(part, 5, 0.5)
    assert not leaving.gone(1.0)
    leaving.keep(lambda name: name != "a", 1.0)
    leaving.reported(fill(GeneratorReport, generator="a", leaving=True, handed=1), 2.0)
    assert not leaving.gone(2.5)
    ((report, parts),) = leaving.gone(4.0)
    assert report.handed == 1 and parts == {} and not leaving.gone(9.0)


def test_parts_wait_a_minute_for_the_report_that_says_why() -> None:
    leaving, part = Leaving(2.0), fill(Part, generator="a", group=3, index=1)
    report = fill(GeneratorReport, generator="a", leaving=True, handed=1)
    for waited, parts in ((59.0, {(3, 1): (part, 5)}), (61.0, {})):
        leaving.arrived(part, 5, 0.0)
        leaving.keep(lambda name: True, waited)
        leaving.reported(report, waited)
        assert leaving.gone(waited + 2.0) == [(report, parts)]


def test_a_late_report_of_a_process_that_was_replaced_is_passed_over(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    old, new = Instance(context, "a", "1"), Instance(context, "a", "2")
    with dispatching(context):
        soon(lambda: len(old.look()) == 8, "all for the only one", old)
        soon(lambda: len(new.look()) == 8, "all for the new one", new)
        old.has.clear()
        soon(lambda: new.look() and context.heart.counters["generators"] == 1, "nothing", old, new)
        assert len(new.has) == 8
        assert not old.look()


def test_a_dispatcher_that_starts_again_leaves_everyone_what_they_have(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    first = Instance(context, "a", "1")
    with dispatching(context):
        soon(lambda: len(first.look()) == 8, "all for the only one", first)
    first.finish(first.has[0])
    second = Instance(context, "b", "1")
    with dispatching(context):
        soon(lambda: context.heart.counters.get("generators") == 2, "both", first, second)
        soon(lambda: first.look() and first.withdrawn, "a request to give back", first, second)
        assert len(first.has) == len(set(first.has)) == 7
        assert not second.look(), "nothing is given twice"


def test_a_profile_that_can_not_be_is_said_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context(SPEC, tmp_path)
    first = Instance(context, "a", "1")
    with caplog.at_level(logging.WARNING), dispatching(context):
        first.report(seconds=[float("nan")])
        soon(lambda: len(first.look()) == 8, "all for the only one", first)
    assert "a reports step times that can't be right: a step of 1 samples can't take nan s" in caplog.text


def test_an_unreadable_report_goes_to_the_dead_letters(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    with dispatching(context):
        context.writer.send(context.topics.generators, b"nonsense", key="x")
        wait_until(lambda: context.heart.counters.get("dead_letters"), what="a dead letter", deadline_s=10)
        first = Instance(context, "a", "1")
        soon(lambda: len(first.look()) == 8, "all for the only one", first)


def reject(context: RoleContext, name: str, offset: int) -> None:
    """What the trainer says of a sample that it can't use."""
    record = Record(context.topics.samples.name, 0, offset, name.encode(), b"")
    context.dead_letter(record, "no good", wanted=name)


def test_a_sample_that_was_no_good_is_made_again(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    first = Instance(context, "a", "1")
    with dispatching(context):
        soon(lambda: len(first.look()) == 8, "all for the only one", first)
        names = list(first.has)
        for name in names[:2]:
            first.finish(name)
        reject(context, names[0], 0)
        soon(lambda: names[0] in first.look(), "it once more", first)
        reject(context, names[1], 1)
        reject(context, "0000099-00", 99)  # nobody knows of that
        soon(lambda: names[1] in first.look(), "the other once more", first)
        assert context.heart.counters["made_again"] == 2
        first.finish(names[0])  # good, this time
    second = Instance(context, "b", "1")
    with dispatching(context):  # one that starts now knows what was no good, and what was made since
        soon(lambda: len(second.look()) == 7, "what is left", second)
        assert sorted(second.has) == sorted(set(names) - {names[0]})


def test_an_unreadable_sample_is_made_again(tmp_path: Path) -> None:
    """Nobody told the dispatcher that it was finished: it believes that it runs."""
    context = make_context(SPEC, tmp_path)
    first = Instance(context, "a", "1")
    with dispatching(context):
        soon(lambda: len(first.look()) == 8, "all for the only one", first)
        name = first.has.pop()
        context.writer.send(context.topics.samples, b"rubbish", key=name)
        reject(context, name, 0)
        soon(lambda: name in first.look(), "it once more", first)


def test_looking_back_finds_what_is_done(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    samples = [make_sample(SPEC, group, index) for group, index in ((0, 0), (0, 1), (1, 1))]
    for sample in samples:
        context.writer.send(context.topics.samples, encode(sample), key="k")
    done = {(sample.group, sample.index): sample.true_length for sample in samples}
    with dispatching(context) as found:
        assert found.done == done
    reject(context, "0000000-01", 1)
    del done[0, 1]
    with dispatching(context) as found:
        assert found.done == done


def test_what_was_done_before_is_not_given_again_and_tells_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[tuple[int, int], int]] = []
    learn = GroupBeliefs.finished

    def finished(
        group_beliefs: GroupBeliefs, board: Board, job: SampleJob, length: int, *, of_running: bool
    ) -> list[tuple[int, int]]:
        told.append((job.key, length))
        return learn(group_beliefs, board, job, length, of_running=of_running)

    monkeypatch.setattr(GroupBeliefs, "finished", finished)
    context = make_context(SPEC, tmp_path)
    done = make_sample(SPEC, 1, 1)
    context.writer.send(context.topics.samples, encode(done), key="k")
    with dispatching(context):
        first = Instance(context, "a", "1")
        soon(lambda: len(first.look()) == 7, "all for the only one", first)
    assert sample_id(1, 1) not in first.has
    assert told == [((1, 1), done.true_length)]


def test_one_that_measured_slow_and_was_left_out_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "SLOW_LEFT_OUT_S", 0.4)
    context = make_context(SPEC, tmp_path)
    slow, fast = Instance(context, "a", "1", slots=64), Instance(context, "b", "1", slots=64)
    dispatched = Dispatched(context)

    def say() -> None:
        slow.report(seconds=[0.05])
        fast.report(seconds=[0.01])

    def both() -> bool:
        say()
        return context.heart.counters.get("generators") == 2

    try:
        wait_until(both, what="both", deadline_s=10)
        dispatched.admit(placed(PROMPTS[:1]))
        wait_until(lambda: (say(), fast.look())[1], what="work for the fast one", deadline_s=10)
        assert not slow.look()
        began = time.monotonic()
        wait_until(lambda: (say(), time.monotonic() > began + 0.6)[1], what="a while", deadline_s=10)
        dispatched.admit(placed(PROMPTS[1:2]))
        wait_until(lambda: (say(), slow.look())[1], what="work for the other one", deadline_s=10)
        dispatched.service.check()
    finally:
        dispatched.close()


def test_who_was_heard_during_a_long_turn_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context(SPEC, tmp_path)
    first, second = Instance(context, "a", "1"), Instance(context, "b", "1")
    held, go, plain = threading.Event(), threading.Event(), Dispatcher.turn
    armed = threading.Event()

    def long_turn(self: Dispatcher, now: float) -> dict[str, list[SampleJob]]:
        if armed.is_set() and not held.is_set():
            held.set()
            go.wait(20)
        return plain(self, now)

    monkeypatch.setattr(Dispatcher, "turn", long_turn)
    with caplog.at_level(logging.INFO), dispatching(context):
        soon(lambda: context.heart.counters.get("generators") == 2, "both", first, second)
        armed.set()
        soon(held.is_set, "a long turn", first, second)
        until = time.monotonic() + 1.5 * SPEC.dispatch.silence_s
        soon(lambda: time.monotonic() > until, "its end", first, second)
        go.set()
        until = time.monotonic() + 0.5
        soon(lambda: time.monotonic() > until, "some more turns", first, second)
        assert context.heart.counters["generators"] == 2
    assert "not heard of" not in caplog.text

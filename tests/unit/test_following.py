"""What follows a run: bounded, from near the ends, whatever is on the topics and whatever the disk does."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.view import follow, line_files
from flows.view.follow import Follower, look_once
from flows.view.line_files import LinesFile, MetricsFile, complete, lines_of
from flows.view.metric_rows import Thinned
from flows.view.plain_json import plain_json
from flows.view.process_notes import ProcessNotes
from flows.view.run_view import RunView
from flows.view.screen import Screens
from flows.view.totals import Totals
from infra import gate
from infra.bus import Record
from infra.roles.context import RoleContext
from schemas.messages import Evaluation, Heartbeat, Prompt, StepRecord
from schemas.topics import Topic
from schemas.wire import encode
from tests.factories import make_context, make_spec
from tests.fakes.fill import fill
from tests.waiting import wait_until


def step(number: int, **fields: Any) -> StepRecord:
    given: dict[str, Any] = {
        "run": "test-1", "step": number, "iteration": number, "version_out": number + 1,
        "groups": np.zeros(2), "partitions": np.zeros(2), "offsets": np.zeros(2),
        "indexes": np.zeros(2),
        "rewards": np.full(2, 0.5), "lengths": np.full(2, 7), "versions": np.full(2, number),
        "predicted": np.full(2, 5.0), "problem_ids": ["a", "b"], "microbatches": np.array([2]),
        "finished_at": float(number + 1),
    }  # fmt: skip
    return fill(StepRecord, **(given | fields))


@pytest.fixture
def context(tmp_path: Path) -> RoleContext:
    return make_context(make_spec(), tmp_path)


def send(context: RoleContext, topic: Topic, *messages: Any) -> None:
    for message in messages:
        raw = message if isinstance(message, bytes) else encode(message)
        context.writer.send(topic, raw, key="k")


def following(context: RoleContext, file: Path | None = None) -> Follower:
    metrics = None if file is None else MetricsFile(file)
    return Follower(context.record, metrics=metrics, connected=lambda record, name: context.bus)


def steps_in(file: Path) -> list[int]:
    return [row["step"] for row in lines_of(file)]


DEEP = b"\x91" * 100_000  # an array in an array in an array


def test_garbage_on_every_topic_is_passed_over(context: RoleContext, tmp_path: Path) -> None:
    topics = context.topics
    bad_prompt = fill(Prompt, run="test-1", purpose="train", size=1, bundle_groups=1)
    for topic in (topics.ledger, topics.evals, topics.weights, topics.dead, topics.status, topics.ranker):
        send(context, topic, b"", b"garbage", DEEP, bad_prompt, fill(Heartbeat, run="other", role="x"))
    send(context, topics.ledger, step(0))
    with following(context, tmp_path / "metrics.jsonl") as follower:
        wait_until(lambda: follower.see(lambda view: len(view.rows)), what="the step")
        assert follower.see(lambda view: view.trouble) == ""
    assert steps_in(tmp_path / "metrics.jsonl") == [0]


def test_a_view_reads_no_topic_from_its_beginning_and_no_prompts(
    context: RoleContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = context.topics
    for number in range(1000):
        send(context, topics.ledger, step(number))
        send(context, topics.prompts, b"a prompt that a view has no business to decode")
    send(
        context,
        topics.status,
        *[fill(Heartbeat, run="test-1", role="feeder", sent_at=float(n)) for n in range(6000)],
    )
    read: dict[str, int] = {}
    poll = type(context.bus.reader(topics.dead)).poll

    def counted(self: Any, wait_s: float, most: int = 500) -> list[Record]:
        found = poll(self, wait_s, most)
        for record in found:
            read[record.topic] = read.get(record.topic, 0) + 1
        return found

    monkeypatch.setattr(type(context.bus.reader(topics.dead)), "poll", counted)
    monkeypatch.setattr(follow, "connect", lambda record, name: context.bus)
    view = look_once(context.record)
    assert read == {topics.ledger.name: 300, topics.status.name: 2000}
    assert view.last is not None and view.last["step"] == 999


@pytest.mark.parametrize("once", [True, False])
def test_steps_are_unpacked_one_by_one(
    context: RoleContext, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    """A record of some hundred kB may become 40 MB, and a read has many."""
    send(context, context.topics.ledger, *map(step, range(30)))
    take, decode = RunView.take, gate.decode
    unpacked, most = list[object](), list[int]()

    def counted(raw: bytes, kind: Any) -> Any:
        unpacked.append(kind)
        return decode(raw, kind)

    def taken(self: RunView, message: object) -> None:
        if isinstance(message, StepRecord):
            most.append(len(unpacked))
            unpacked.clear()
        take(self, message)

    monkeypatch.setattr(gate, "decode", counted)
    monkeypatch.setattr(RunView, "take", taken)
    monkeypatch.setattr(follow, "connect", lambda record, name: context.bus)
    if once:
        look_once(context.record)
    else:
        with following(context) as follower:
            wait_until(lambda: follower.see(lambda view: len(view.rows)) == 30, what="the steps")
    assert most == [1] * 30


def test_looking_ends_at_the_ends_that_were_found_though_the_topic_grows(
    context: RoleContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = context.topics
    beats = fill(Heartbeat, run="test-1", role="feeder", sent_at=1.0)
    send(context, topics.status, *[beats] * 100)
    poll = type(context.bus.reader(topics.dead)).poll

    def growing(self: Any, wait_s: float, most: int = 500) -> list[Record]:
        send(context, topics.status, *[beats] * 600)  # faster than anybody reads
        return poll(self, wait_s, most)

    monkeypatch.setattr(type(context.bus.reader(topics.dead)), "poll", growing)
    monkeypatch.setattr(follow, "connect", lambda record, name: context.bus)
    look_once(context.record, deadline_s=60)
    assert sum(map(len, context.bus.log(topics.status))) == 700  # type: ignore[attr-defined]


def test_the_file_grows_with_the_run_and_is_gone_on_with_behind_its_last_whole_line(
    context: RoleContext, tmp_path: Path
) -> None:
    file, topics = tmp_path / "metrics.jsonl", context.topics
    send(context, topics.ledger, *map(step, range(500)), step(498, trainer_epoch=1))
    with following(context, file) as follower:
        wait_until(lambda: len(steps_in(file)) == 500, what="500 lines")
        send(context, topics.ledger, step(500))
        wait_until(lambda: len(steps_in(file)) == 501, what="the next line")
        follower.see(lambda view: view)
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])  # the last line is torn
    send(context, topics.ledger, step(501))
    with following(context, file):
        wait_until(lambda: len(steps_in(file)) == 502, what="the lines again")
    assert steps_in(file) == list(range(502))
    assert file.read_bytes().startswith(whole)
    rows = list(lines_of(file))
    assert rows[0]["samples_per_s"] is None and rows[7]["samples_per_s"] == pytest.approx(2.0)


def test_a_full_disk_costs_no_line_and_is_said(
    context: RoleContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, full = tmp_path / "metrics.jsonl", [True]
    write = os.pwrite

    def pwrite(target: int, data: bytes, at: int) -> int:
        if full[0]:
            write(target, data[: len(data) // 2], at)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(target, data, at)

    monkeypatch.setattr(line_files.os, "pwrite", pwrite)
    monkeypatch.setattr(follow, "AGAIN_S", 0.05)
    monkeypatch.setattr(follow, "EVERY_S", 0.02)
    send(context, context.topics.ledger, *map(step, range(3)))
    with following(context, file) as follower:
        wait_until(lambda: "No space left" in follower.see(lambda view: view.trouble), what="its trouble")
        assert follower.see(lambda view: len(view.rows)) == 3
        send(context, context.topics.ledger, step(3))
        full[0] = False
        wait_until(lambda: steps_in(file) == [0, 1, 2, 3], what="all lines")
        wait_until(lambda: not follower.see(lambda view: view.trouble), what="the end of the trouble")


def test_notes_that_can_not_be_written_are_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    (tmp_path / "processes.jsonl").mkdir()  # nothing can be written there
    notes, view = ProcessNotes(tmp_path, 0.0, said.append), RunView("test-1", make_spec())
    view.live = True
    view.take(fill(Heartbeat, run="test-1", role="feeder", state="admitting", sent_at=1.0))
    for _ in range(3):
        notes.note_all(view)
    assert len(said) == 1 and "processes.jsonl can't be written, and the run goes on without it" in said[0]


def test_a_resume_notes_no_evaluation_again(tmp_path: Path) -> None:
    view = RunView("test-1", make_spec())
    for version in (0, 2, 1, 2):
        view.take(
            fill(Evaluation, version=version, rewards=np.ones(1), problem_ids=["a"], lengths=np.ones(1))
        )
        ProcessNotes(tmp_path, 0.0, print).note_all(view)
    assert [row["version"] for row in lines_of(tmp_path / "evaluations.jsonl")] == [0, 2, 1]


def test_files_for_other_programs_have_no_number_that_is_not_finite(
    context: RoleContext, tmp_path: Path
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.open()
    for number, value in enumerate((np.nan, np.inf, 1.0)):
        file.take(Record("ledger", 0, number, b"", b""), step(number, metrics={"grad_norm": value}))
    notes, view = ProcessNotes(tmp_path, 0.0, print), RunView("test-1", make_spec())
    view.take(fill(Heartbeat, role="trainer", counters={"step": np.nan}))
    notes.note_all(view)
    for name in ("metrics.jsonl", "processes.jsonl"):
        assert not re.search("NaN|Infinity", (tmp_path / name).read_text())
    assert [row["grad_norm"] for row in lines_of(tmp_path / "metrics.jsonl")] == [None, None, 1.0]
    assert plain_json({"a": [np.nan, (np.inf, 1.0)]}) == '{"a": [null, [null, 1.0]]}'
    old = tmp_path / "old.jsonl"
    old.write_text('{"step": 0, "grad_norm": NaN}\n{"step": 1, "grad_norm": -Infinity}\n')
    assert [row["step"] for row in lines_of(old)] == [0, 1], "files of older versions are read"


def test_any_error_in_the_thread_is_said_and_it_goes_on(context: RoleContext) -> None:
    send(context, context.topics.ledger, step(0))
    broken = [True]

    def connected(record: object, name: str) -> Any:
        if broken[0]:
            raise RecursionError("too deep")
        return context.bus

    with Follower(context.record, connected=connected) as follower:
        wait_until(lambda: "too deep" in follower.see(lambda view: view.trouble), what="its trouble")
        broken[0] = False
        wait_until(lambda: follower.see(lambda view: len(view.rows)), what="the view")
        assert follower.see(lambda view: view.trouble) == ""


def test_a_thread_that_has_ended_is_started_again(context: RoleContext) -> None:
    follower = following(context)
    begin = follower._follow
    follower._thread = type(follower._thread)(target=lambda: None)  # it ends at once
    with follower:
        follower._thread.join()
        assert follower._follow == begin
        send(context, context.topics.ledger, step(0))
        wait_until(lambda: follower.see(lambda view: len(view.rows)), what="the step")


def test_a_screen_that_fails_ends_nothing_and_hides_no_other() -> None:
    shown: list[str] = []

    class Broken:
        def say(self, text: str) -> None:
            raise UnicodeEncodeError("ascii", "é", 0, 1, "no such letter")

        progress = show = say  # type: ignore[assignment]

    class Sound(Broken):
        def say(self, text: str) -> None:
            shown.append(text)

    screens = Screens([Broken(), Sound()])  # type: ignore[list-item]
    screens.say("news")
    screens.say("more")
    assert shown == ["news", "more"]


def test_the_report_reads_the_ledger_from_behind_the_file(
    context: RoleContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = tmp_path / "metrics.jsonl", []
    send(context, context.topics.ledger, *map(step, range(40)))
    complete(MetricsFile(file), context.bus, context.topics, "test-1")
    send(context, context.topics.ledger, step(40), b"garbage", step(41))
    monkeypatch.setattr(line_files, "step_row", lambda one: (read.append(one.step), {"step": one.step})[1])
    monkeypatch.setattr(line_files, "with_rates", lambda rows: rows)
    complete(MetricsFile(file), context.bus, context.topics, "test-1")
    assert read == [40, 41] and steps_in(file) == list(range(42))


@pytest.mark.parametrize(
    "damage", ["torn in the middle", "its head is gone", "of an older version", "garbage"]
)
def test_lines_that_are_missing_are_read_from_the_ledger(
    damage: str, context: RoleContext, tmp_path: Path
) -> None:
    file = tmp_path / "metrics.jsonl"
    send(context, context.topics.ledger, *map(step, range(20)))
    complete(MetricsFile(file), context.bus, context.topics, "test-1")
    lines = file.read_text().splitlines(keepends=True)
    damaged: dict[str, Callable[[], str]] = {
        "torn in the middle": lambda: "".join(lines[:7]) + lines[7][:20] + "\n" + "".join(lines[8:]),
        "its head is gone": lambda: "".join(lines[5:]),
        "of an older version": lambda: "".join(line.replace('"ledger"', '"other"') for line in lines),
        "garbage": lambda: "[" * 50_000 + "\n" + "".join(lines[:4]) + '{"step": "x"}\n17\n',
    }
    file.write_text(damaged[damage]())
    complete(MetricsFile(file), context.bus, context.topics, "test-1")
    assert steps_in(file) == list(range(20))


def test_what_the_ledger_has_lost_stays_in_the_file(context: RoleContext, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    send(context, context.topics.ledger, *map(step, range(10)))
    complete(MetricsFile(file), context.bus, context.topics, "test-1")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]) + "torn\n" + "".join(lines[6:]))
    fresh = make_context(make_spec(), tmp_path / "other")  # a ledger without its head
    send(fresh, fresh.topics.ledger, *map(step, range(5, 12)))
    complete(MetricsFile(file), fresh.bus, fresh.topics, "test-1")
    assert steps_in(file) == list(range(12))


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LinesFile(tmp_path / "f.jsonl")
    file.append('{"n": 1}')
    write = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(line_files.os, "pwrite", lambda target, data, at: write(target, data[:3], at))
        with pytest.raises(OSError, match="the disk took 3 of 9 bytes"):
            file.append('{"n": 2}')
    file.append('{"n": 3}')
    assert (tmp_path / "f.jsonl").read_text() == '{"n": 1}\n{"n": 3}\n'


def test_a_report_of_100_000_steps_holds_what_one_of_4000_does(tmp_path: Path) -> None:
    row = {
        "iteration": 0,
        "step": 0,
        "reward": 0.5,
        "samples": 8,
        "tokens": 80,
        "samples_per_s": 4.0,
        "idle": 0.5,
    }
    totals, shown = Totals(), Thinned[dict[str, Any]]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for number in range(100_000):
            file.write(json.dumps(row | {"iteration": number, "step": number}) + "\n")
    for found in lines_of(tmp_path / "metrics.jsonl"):
        totals.add(found)
        shown.add(found)
    summary = totals.summary()
    assert (summary["steps"], summary["iterations"], summary["samples"]) == (100_000, 100_000, 800_000)
    assert summary["training_s"] == pytest.approx(200_000) and summary["trainer_idle"] == pytest.approx(0.5)
    assert 2000 <= len(shown.kept) <= 4000
    gaps = np.diff([one["step"] for one in shown.kept])
    assert gaps.min() == gaps.max()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # kilobytes


def test_what_is_on_the_log_can_be_waited_for(context: RoleContext) -> None:
    """The last step of a run is a second behind in a view: a flow shows it before it ends."""
    with following(context) as follower:
        follower.wait_for(lambda view: view.live, 10.0)
        send(context, context.topics.ledger, step(0))
        follower.wait_for(lambda view: view.iterations_begun() >= 1, 10.0)
        assert follower.see(lambda view: view.iterations_begun()) == 1
        follower.wait_for(lambda view: view.iterations_begun() >= 99, 0.2)  # what never comes ends nothing

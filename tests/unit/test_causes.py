"""Each second of a process has a cause, and the notes of a run tell them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flows.view.metric_rows import evaluation_row
from flows.view.process_notes import ProcessNotes
from flows.view.run_view import RunView
from infra.roles.causes import OTHER, Causes
from infra.roles.heart import Heart
from schemas.messages import MOST_CAUSES, Evaluation, Heartbeat, StepRecord
from schemas.wire import Unreadable, decode, encode
from tests.factories import make_spec
from tests.fakes.fill import fill


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_all_time_counts_for_the_cause_in_force() -> None:
    clock = Clock()
    causes = Causes("starting", clock)
    for cause, seconds in (("training", 3.0), ("wait: samples", 2.0), ("training", 5.0), ("training", 1.0)):
        clock.now += 0.25
        causes.begin(cause)
        clock.now += seconds - 0.25
    assert causes.seconds() == {"starting": 0.25, "training": 2.75 + 0.25 + 4.75 + 1.0, "wait: samples": 2.0}
    assert sum(causes.seconds().values()) == pytest.approx(clock.now - 100.0)


def test_measured_seconds_are_moved_to_a_cause_of_their_own() -> None:
    clock = Clock()
    causes = Causes("generating", clock)
    clock.now += 10.0
    causes.recount("installing weights", 4.0)
    assert causes.seconds() == {"generating": 6.0, "installing weights": 4.0}
    causes.recount("installing weights", 1e9)
    causes.recount("installing weights", -3.0)
    assert causes.seconds() == {"generating": 0.0, "installing weights": 10.0}


def test_any_number_of_causes_takes_as_much_memory_and_loses_no_time() -> None:
    clock = Clock()
    causes = Causes("starting", clock)
    for number in range(1000):
        causes.begin(f"cause {number}")
        clock.now += 1.0
    found = causes.seconds()
    assert len(found) == MOST_CAUSES and found[OTHER] > 900 and sum(found.values()) == 1000.0


def test_a_heartbeat_says_the_causes_and_is_read_without_them() -> None:
    heart = Heart("r-1", "generator", 0)
    heart.waiting("weights 7", unblocked_by="trainer", cause="weights")
    heart.working("generating")
    said = decode(encode(heart.message()), Heartbeat)
    assert list(said.causes) == ["starting", "wait: weights", "generating"]
    assert sum(said.causes.values()) < 5.0
    too_many = fill(Heartbeat, causes={str(number): 1.0 for number in range(MOST_CAUSES + 1)})
    with pytest.raises(Unreadable, match="names 33 causes"):
        decode(encode(too_many), Heartbeat)


def test_notes_have_causes_queues_and_evaluations(tmp_path: Path) -> None:
    notes, view = ProcessNotes(tmp_path, 0.0, print), RunView("r-1", make_spec(lengths={"classes": 2}))
    view.take(fill(Heartbeat, role="trainer", causes={"training": 2.00049}, pid=5, sent_at=9.0))
    view.take(step(0))
    view.take(
        fill(
            Evaluation,
            version=0,
            problem_ids=["a", "a", "b"],
            rewards=np.array([1.0, 0.0, 1.0], np.float32),
            lengths=np.ones(3, np.int32),
        )
    )
    view.take_all([], {0: 10, 1: 7})
    notes.note_all(view)
    notes.note_all(view)

    def lines(name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    assert (
        lines("processes.jsonl")[0]["causes"] == {"training": 2.0} and lines("processes.jsonl")[0]["pid"] == 5
    )
    assert [line["lag"] for line in lines("queues.jsonl")] == [[6, 0], [6, 0]]
    assert [line["version"] for line in lines("evaluations.jsonl")] == [0], "each is noted once"


def step(number: int, **fields: object) -> StepRecord:
    given: dict[str, object] = {
        "run": "test-1",
        "step": number,
        "groups": np.array([1, 1, 2, 2]),
        "indexes": np.array([0, 1, 0, 1], np.int16),
        "partitions": np.array([0, 1, 0, 1], np.int16),
        "offsets": np.array([0, 0, 3, 6]),
        "rewards": np.array([0.5, np.nan, 1.0, 0.0], np.float32),
        "lengths": np.array([7, 3, 16, 5], np.int32),
        "versions": np.zeros(4, np.int32),
        "problem_ids": ["a"] * 4,
        "predicted": np.array([8, 8, 4, 5], np.float32),
        "microbatches": np.array([4], np.int32),
    }
    return fill(StepRecord, **given | fields)


def test_the_standard_error_counts_problems_and_not_samples() -> None:
    one = fill(Evaluation, problem_ids=["a", "a", "b", "b"], rewards=np.array([1, 1, 0, 0], np.float32))
    assert evaluation_row(one)["reward_error"] == pytest.approx(0.5)
    alone = fill(Evaluation, problem_ids=["a"], rewards=np.array([1], np.float32))
    assert evaluation_row(alone)["reward_error"] is None


def test_a_view_holds_the_newest_lengths_and_the_lag() -> None:
    view = RunView("test-1", make_spec(lengths={"classes": 2}))
    assert view.lag() is None
    for number in range(3000):
        view.take(step(number))
    assert len(view.lengths) == 4000 and list(view.lengths)[:2] == [(8.0, 7), (8.0, 3)]
    large = 100_000
    many = {
        name: np.zeros(large, np.int32)
        for name in (
            "groups",
            "indexes",
            "partitions",
            "offsets",
            "lengths",
            "rewards",
            "versions",
            "predicted",
        )
    }
    view.take(step(3000, **many, problem_ids=["a"] * large))
    assert sum(pair == (0.0, 0) for pair in view.lengths) == 400, "a large step does not push out all others"
    view.take(step(3001, partitions=np.array([0, 1, 9, 1], np.int16)))  # of more classes than the run has
    view.take_all([], {0: 4, 1: 10})
    assert view.lag() == [0, 3]


def test_a_wait_is_as_long_as_it_was_whatever_is_done_to_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, passed = [1e9], [0.0]
    monkeypatch.setattr("infra.roles.heart.time.time", lambda: wall[0])
    monkeypatch.setattr("infra.roles.heart.time.monotonic", lambda: passed[0])
    heart = Heart("r-1", "trainer", 0)
    heart.waiting("samples", unblocked_by="generators")
    for jump in (-7200.0, 86400.0):
        wall[0], passed[0] = wall[0] + jump, passed[0] + 5.0
        said = heart.message()
        assert said.sent_at - said.since == pytest.approx(passed[0])
    heart.working("training")
    assert heart.counters["idle_s"] == pytest.approx(10.0)

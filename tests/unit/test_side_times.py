"""Both sides' times of an iteration, from heartbeats and the ledger: no wait is in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flows.balancing.side_times import IterationTimes, SideTimes
from schemas.messages import Heartbeat, StepRecord
from schemas.runspec import RunSpec
from tests.factories import make_spec
from tests.fakes.fill import fill

SYNC = make_spec(generator={"slots": 4})
ASYNC = make_spec(generator={"slots": 4}, algorithm={"mode": "async", "staleness": 1})
SAMPLES = 8


def beat(at: float, number: int = 0, role: str = "generator", **fields: Any) -> Heartbeat:
    values: dict[str, Any] = {
        "run": "test-1", "role": role, "number": number, "pid": 7, "host": "h", "state": "generating",
        "sent_at": at, "since": at, "counters": {"version": 0.0}, "causes": {},
    }  # fmt: skip
    return fill(Heartbeat, **{**values, **fields})


def step(iteration: int, at: float, **metrics: float) -> StepRecord:
    return fill(
        StepRecord, run="test-1", iteration=iteration, step=iteration, last_of_iteration=True,
        finished_at=at, metrics={"compute_s": 2.0, "waited_s": 0.0, **metrics},
        groups=np.arange(SAMPLES), lengths=np.full(SAMPLES, 10, np.int32), partitions=np.zeros(SAMPLES),
        offsets=np.arange(SAMPLES), indexes=np.zeros(SAMPLES), rewards=np.zeros(SAMPLES),
        versions=np.zeros(SAMPLES), predicted=np.ones(SAMPLES), problem_ids=["p"] * SAMPLES,
        microbatches=np.array([SAMPLES]),
    )  # fmt: skip


def times(spec: RunSpec, *messages: object, since: float = 0.0) -> list[IterationTimes]:
    found = SideTimes(spec, since)
    for message in messages:
        found.take(message)
        found.take(message)  # a view that begins anew gives them again
    return list(found.ready())


def worked(at: float, busy: float, waited: float, number: int = 0, **counters: float) -> Heartbeat:
    """A generator's heartbeat; it was born at 0 and is generating."""
    causes = {"generating": busy, "wait: weights": waited}
    return beat(at, number, causes=causes, counters={"version": 0.0, **counters})


def test_in_sync_mode_it_is_the_work_of_the_busiest_generator() -> None:
    (one,) = times(
        SYNC, step(0, 10), step(1, 20),
        worked(10, 6, 4), worked(20, 13, 7), worked(10, 5, 5, 1), worked(20, 8, 12, 1),
    )  # fmt: skip
    assert (one.iteration, one.generators) == (1, 2)
    assert one.gen_s == pytest.approx(7) and one.train_s == pytest.approx(2)
    assert one.tokens == 80


def test_full_slots_are_shared_by_one_more_and_a_tail_is_not() -> None:
    """10 s of work: 4 with full slots, 2 in the tail, 4 with two samples at a time."""
    causes = {"generating": 8.0, "generating the long tail": 2.0, "wait: weights": 0.0}
    counters = {"version": 0.0, "full_s": 4.0, "slot_s": 4 * 4.0 + 6 * 2, "step_s": 1.0, "sample_s": 0.5}
    (one,) = times(
        SYNC, step(0, 10), step(1, 20),
        beat(10, causes={"wait: weights": 10.0}), beat(20, causes={"wait: weights": 10.0} | causes,
                                                       counters=counters),
    )  # fmt: skip
    assert one.gen_s == pytest.approx(10)
    assert one.more_s == pytest.approx(4 / 2 + 4 * (1.5 / 2) + 2)  # two at a time take 2 s, one alone 1.5
    assert one.fewer_s == pytest.approx(one.gen_s)  # there is no fewer than one


def test_one_fewer_fills_slots_and_then_takes_longer() -> None:
    def of(number: int) -> list[Heartbeat]:
        counters = {"version": 0.0, "full_s": 0.0, "slot_s": 4 * 3.0, "step_s": 1.0, "sample_s": 0.0}
        return [
            beat(10, number, causes={"wait: weights": 10.0}),
            beat(20, number, causes={"wait: weights": 16.0, "generating": 4.0}, counters=counters),
        ]

    (one,) = times(SYNC, step(0, 10), step(1, 20), *of(0), *of(1))
    # three at a time, and six would be needed of four slots
    assert one.fewer_s == pytest.approx(4 * 6 / 4)
    assert one.more_s == pytest.approx(4)  # a step takes as long with two as with three


def test_in_async_mode_empty_slots_are_a_wait() -> None:
    """It drew one sample at a time though there is room for four: it lacked prompts."""
    trainer = [beat(t, role="trainer", causes={"training": t / 2, "publishing": t / 2}) for t in (10.0, 20.0)]
    (one,) = times(
        ASYNC, step(0, 10), step(1, 20), *trainer,
        worked(10, 10, 0, full_s=0.0, slot_s=10.0, made=8.0, step_s=1.0, sample_s=0.0),
        worked(20, 20, 0, full_s=0.0, slot_s=20.0, made=16.0, step_s=1.0, sample_s=0.0),
    )  # fmt: skip
    assert one.gen_s == pytest.approx(10 / 4) and one.train_s == pytest.approx(10)


def test_in_async_mode_what_was_made_counts_not_what_was_trained() -> None:
    """While lengths grow, the samples in work are longer than those that are trained."""
    (one,) = times(
        ASYNC, step(0, 10), step(1, 20, waited_s=6.0),
        worked(10, 10, 0, full_s=10.0, slot_s=40.0, made=8.0), worked(20, 20, 0, full_s=20.0, slot_s=80.0,
                                                                      made=12.0),
    )  # fmt: skip
    assert one.gen_s == pytest.approx(20)  # 4 samples took 10 s, and an iteration has 8
    assert one.more_s == pytest.approx(10)


def test_between_two_heartbeats_the_wait_is_where_it_was() -> None:
    """The iteration ends at 10; at 9 the generator waited, and at 13 it had worked for 2 s."""
    waits = beat(9, causes={"wait: weights": 4.0, "generating": 5.0}, state="waiting", waits_for="weights 1")
    (one,) = times(
        SYNC, step(0, 10), step(1, 20), waits,
        beat(13, causes={"wait: weights": 6.0, "generating": 7.0}),
        beat(20, causes={"wait: weights": 8.0, "generating": 12.0}),
    )  # fmt: skip
    assert one.gen_s == pytest.approx(7)  # 2 + 5: none of it before 10


def test_who_is_there() -> None:
    """Not who has no weights yet, has ended, or has long been silent."""
    others = [
        beat(19, 1, counters={}), beat(20, 1, counters={}), beat(12, 2, state="ended"), beat(3, 3),
    ]  # fmt: skip
    (one,) = times(SYNC, step(0, 10), step(1, 20), worked(10, 6, 4), worked(20, 13, 7), *others)
    assert one.generators == 1


def test_an_iteration_waits_for_heartbeats_and_not_for_ever() -> None:
    found = SideTimes(SYNC)
    for message in (step(0, 10), step(1, 20), worked(10, 6, 4), worked(19, 12, 7)):
        found.take(message)
    assert not list(found.ready())
    found.take(beat(26, 5, role="trainer"))
    assert len(list(found.ready())) == 1
    assert not list(found.ready())


def test_a_new_trainer_and_the_time_before_the_start_are_no_measure() -> None:
    beats = [worked(10, 6, 4), worked(20, 13, 7), worked(30, 20, 10)]
    again = fill(
        StepRecord, run="test-1", iteration=1, step=1, last_of_iteration=True, finished_at=20.0,
        trainer_epoch=1, groups=np.arange(8), lengths=np.ones(8, np.int32), metrics={},
    )  # fmt: skip
    assert not times(SYNC, step(0, 10), again, *beats)
    assert [
        one.iteration for one in times(SYNC, step(0, 10), step(1, 20), step(2, 30), *beats, since=15)
    ] == [2]


def test_a_process_that_was_started_anew_counts_from_its_birth() -> None:
    fresh = beat(20, pid=8, causes={"starting": 3.0, "generating": 4.0})
    (one,) = times(SYNC, step(0, 10), step(1, 20), worked(10, 6, 4), fresh)
    assert one.gen_s == pytest.approx(4)

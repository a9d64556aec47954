"""A generator's core on a replay engine in virtual time: what becomes of samples when new weights come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.weights.digest import digests_of, root_digest
from infra.weights.patch import PatchFile
from infra.weights.weights_error import WeightsError
from producers.dispatch.jobs import SampleJob
from producers.engines.without_model import ReplayEngine, VirtualClock
from producers.generator_core import Decoding, MadeSample
from producers.installing import VerifiedWeights
from schemas.admission import admissible, iteration_of, oldest_version
from schemas.identity import SampleKey, sample_key
from schemas.messages import EVAL
from tests.factories import make_patch, make_spec
from tests.unit.test_backlog import prompt

STEP_S = 1.0
LENGTHS = {0: 10, 1: 4, 2: 30, 3: 7}


def version(number: int) -> VerifiedWeights:
    tensors = {"w": torch.full((2,), float(number))}
    digests = digests_of(tensors)
    root = root_digest(digests)
    return VerifiedWeights(number, root, digests, make_patch(tensors, root))


class Bench:
    """A core of two slots and its clock; steps take a second."""

    def __init__(
        self, on_update: str, lengths: dict[int, int], slots: int = 2, prefill_s: float = 0.0,
        engine: type[ReplayEngine] = ReplayEngine,
    ) -> None:  # fmt: skip
        self.clock = VirtualClock()
        self.engine = engine(
            np.full(slots + 1, STEP_S),
            lambda request: lengths[sample_key(request.id)[0]],
            self.clock,
            prefill_s=prefill_s,
        )
        spec = make_spec(generator={"slots": slots, "on_update": on_update})
        self.core = Decoding(spec, self.engine, self.clock.now)
        self.made: dict[SampleKey, MadeSample] = {}

    def go(self, seconds: float = math.inf) -> None:
        """Let time pass, or work until something is made."""
        until, before = self.clock.time + seconds, len(self.made)
        while True:
            self.core.fill()
            for one in self.core.step(0.0):
                self.made[one.begun.job.key] = one
            if self.clock.time >= until or (seconds == math.inf and len(self.made) > before):
                return
            self.clock.time = min(self.engine.next_end(), until)
            assert self.clock.time < math.inf, "it waits for nothing"

    def versions(self, group: int) -> list[tuple[int, int]]:
        """Which weights made a sample from which token on."""
        begun = self.made[group, 0].begun
        return list(zip(begun.version_starts, begun.versions, strict=True))


def job(group: int, **fields: object) -> SampleJob:
    return SampleJob(
        prompt(group, **{"min_version": 0, "iteration": 9, "predicted": float(LENGTHS[group]), **fields}), 0
    )


@pytest.mark.parametrize("on_update", ["continue", "recompute"])
def test_a_running_sample_goes_on_and_says_from_which_token_on(on_update: str) -> None:
    bench = Bench(on_update, LENGTHS)
    for group in range(4):
        bench.core.take(job(group))
    bench.core.update(version(0))
    bench.go(7.0)  # the first seven tokens of the two longest
    bench.core.update(version(1))
    while len(bench.made) < 4:
        bench.go()
    assert bench.versions(2) == [(0, 0), (7, 1)] and bench.versions(0) == [(0, 0), (7, 1)]
    assert bench.versions(3) == [(0, 1)] and bench.versions(1) == [(0, 1)]
    assert bench.made[2, 0].begun.roots == [version(0).root, version(1).root]


def test_at_rest_nothing_is_drawn_and_samples_go_on_where_they_were() -> None:
    bench = Bench("continue", LENGTHS)
    for group in (0, 1):
        bench.core.take(job(group))
    bench.core.update(version(0))
    bench.go(2.0)
    assert not bench.core.is_done
    bench.core.rest()
    bench.core.rest()
    bench.clock.time += 1000.0
    assert bench.core.step(0.0) == [] and sorted(tokens for _, tokens in bench.core.held()) == [2, 2]
    bench.core.update(version(1))
    assert bench.core.version == 0, "weights wait for the engine to go on"
    while len(bench.made) < 2:
        bench.go()
    assert bench.clock.time == pytest.approx(1000.0 + 10.0) and bench.core.is_done
    assert bench.versions(0) == bench.versions(1) == [(0, 0), (2, 1)]
    bench.core.rest()
    bench.core.take(job(2, min_version=2))
    assert bench.core.fill() == 0 and bench.core.is_done, "the engine rests while it has nothing to do"
    bench.core.update(version(2))
    assert bench.core.fill() == 1


def test_computing_anew_takes_the_time_of_a_prefill() -> None:
    took = {}
    for on_update in ("continue", "recompute"):
        bench = Bench(on_update, {0: 10}, prefill_s=0.5)
        bench.core.take(job(0))
        bench.core.update(version(0))
        bench.go(0.5 + 4.0)  # a prompt of one token, and four tokens
        bench.core.update(version(1))
        bench.go()
        took[on_update] = bench.clock.time
    assert took["continue"] == pytest.approx(0.5 + 10)
    assert took["recompute"] == pytest.approx(took["continue"] + 0.5 * (1 + 4))


def test_a_sample_that_was_not_begun_by_the_old_weights_does_not_name_them() -> None:
    bench = Bench("continue", LENGTHS)
    bench.core.take(job(0))
    bench.core.update(version(0))
    bench.core.fill()
    bench.core.update(version(3))
    bench.go()
    assert bench.versions(0) == [(0, 3)]


def test_waiting_weights_come_when_the_old_ones_have_made_all_that_they_may() -> None:
    bench = Bench("wait", LENGTHS)
    for group in range(3):
        bench.core.take(job(group))
    bench.core.take(job(3, min_version=1))
    bench.core.update(version(0))
    bench.go(1.0)
    bench.core.update(version(1))
    bench.core.update(version(2))
    while len(bench.made) < 3:
        assert bench.core.version == 0
        bench.go()
    assert bench.clock.time == 30, "the slots are filled in the meantime"
    bench.go()
    assert bench.core.version == 2
    assert [bench.versions(group) for group in range(4)] == [[(0, 0)], [(0, 0)], [(0, 0)], [(0, 2)]]


@pytest.mark.parametrize("on_update", ["continue", "wait"])
def test_what_is_trained_is_dropped_and_holds_nothing_up(on_update: str) -> None:
    bench = Bench(on_update, LENGTHS)
    for group in range(3):
        bench.core.take(job(group, iteration=0))
    bench.core.take(job(3, purpose=EVAL, iteration=0))
    bench.core.update(version(0))
    bench.go(1.0)
    bench.core.update(version(1))
    bench.go()
    assert bench.core.version == (1 if on_update == "continue" else 0)
    assert list(bench.made) == [(3, 0)], "evaluation is of the version that it names"
    assert bench.core.held() == []


def test_weights_that_the_engine_does_not_hold_are_refused() -> None:
    bench = Bench("continue", LENGTHS)
    good = version(1)
    bench.core.update(replace(good, digests={"w": "0" * 32}))
    with pytest.raises(WeightsError, match=r"does not hold version 1: w differ \(1 of 1 tensors\)"):
        bench.core.fill()
    assert bench.core.running == 0


class SlowEngine(ReplayEngine):
    """Takes its time beside decoding: until it is told that it is done."""

    ready = known = True
    prepared = 0

    def prepare(self, patch: PatchFile) -> None:
        self.prepared += 1
        super().prepare(patch)

    def is_ready(self) -> bool:
        return self.ready

    def digests(self) -> Mapping[str, str] | None:
        return super().digests() if self.known else None


def test_what_unverified_weights_have_made_stays_here_in_order() -> None:
    bench = Bench("continue", LENGTHS, slots=3, engine=SlowEngine)
    for group in range(4):
        bench.core.take(job(group))
    bench.core.update(version(0))
    bench.go(5.0)
    bench.engine.known = False
    bench.core.update(version(1))
    bench.go(3.0)  # group 3 has ended: its last token is of version 1
    assert bench.core.version == 1 and not bench.core.is_verified
    bench.core.update(version(2))
    bench.go(4.0)  # so have groups 0 and 1; version 2 waits until it is known that 1 is there
    assert bench.made == {} and bench.core.version == 1 and bench.engine.prepared == 2
    assert sorted(bench.core.held()) == [((0, 0), 10), ((1, 0), 4), ((2, 0), 12), ((3, 0), 7)]
    assert bench.core.running == 4 and not bench.core.take(job(3))
    with pytest.raises(AssertionError, match="handed over only when the weights are verified"):
        bench.core.hand_over(["0000002-00"])
    bench.engine.known = True
    bench.go(0.0)
    assert list(bench.made) == [(3, 0), (0, 0), (1, 0)]
    assert bench.versions(3) == [(0, 0), (5, 1)] and bench.versions(0) == [(0, 0), (5, 1)]
    while len(bench.made) < 4:
        bench.go()
    assert bench.versions(2) == [(0, 0), (5, 1), (12, 2)] and bench.core.version == 2


def test_what_refused_weights_have_made_never_leaves() -> None:
    bench = Bench("continue", LENGTHS, engine=SlowEngine)
    bench.core.take(job(1))
    bench.engine.known = False
    bench.core.update(replace(version(0), digests={"w": "0" * 32}))
    bench.go(10.0)
    assert bench.core.held() == [((1, 0), 4)]
    bench.engine.known = True
    with pytest.raises(WeightsError, match="That version is not used"):
        bench.core.step(0.0)
    assert bench.made == {}


@pytest.mark.parametrize("on_update", ["continue", "recompute"])
def test_it_goes_on_with_the_old_weights_until_the_new_are_prepared(on_update: str) -> None:
    bench = Bench(on_update, LENGTHS, slots=1, engine=SlowEngine)
    bench.core.take(job(2))
    bench.core.update(version(0))
    bench.go(3.0)
    bench.engine.ready = False
    first, second = version(1), version(2)
    bench.core.update(first)
    bench.go(4.0)
    assert not first.claim(), "it is being prepared: a newer one can't take its place any more"
    bench.core.update(second)
    bench.go(1.0)
    assert bench.core.version == 0
    bench.engine.ready = True
    bench.go(1.0)
    while not bench.made:
        bench.go()
    assert bench.versions(2) == [(0, 0), (8, 1), (9, 2)]
    assert bench.core.installs == 3


def test_one_that_waits_makes_room_for_a_newer_one() -> None:
    bench = Bench("wait", LENGTHS, engine=SlowEngine)
    bench.core.take(job(1))
    bench.core.update(version(0))
    bench.go(1.0)
    first, second = version(1), version(2)
    bench.core.update(first)
    bench.go(1.0)
    assert bench.engine.prepared == 2 and first.claim(), "prepared, not claimed: `Newest` may have it"
    bench.go()
    assert bench.core.version == 0, "it is void: a newer one is about to come"
    bench.core.update(second)
    bench.engine.ready = False
    bench.core.fill()
    bench.core.take(job(3))
    bench.core.fill()
    assert bench.core.running == 0 and not second.claim(), "nothing begins with the old ones any more"
    bench.engine.ready = True
    bench.go()
    assert bench.versions(3) == [(0, 2)]


def test_a_job_comes_in_once_and_goes_back_only_if_it_is_not_begun() -> None:
    bench = Bench("continue", LENGTHS, slots=1)
    assert bench.core.take(job(2)) and bench.core.take(job(1))
    assert not bench.core.take(job(1))
    bench.core.update(version(0))
    bench.core.fill()
    assert not bench.core.take(job(2))
    assert dict(bench.core.held()) == {(2, 0): 0, (1, 0): -1}
    assert bench.core.give_back(["0000002-00", "0000001-00", "0000003-00"]) == ["0000001-00"]
    assert bench.core.queued == 0 and bench.core.running == 1


@pytest.mark.parametrize("on_update", ["continue", "recompute", "wait"])
@pytest.mark.parametrize("newer", [False, True])
def test_a_sample_that_moves_goes_on_where_it_was(on_update: str, newer: bool) -> None:
    first, second = Bench(on_update, LENGTHS), Bench(on_update, LENGTHS)
    first.core.take(job(2))
    first.core.update(version(3))
    first.go(7.0)
    (left,) = first.core.hand_over(["0000002-00", "0000001-00"])
    assert first.core.held() == [] and len(left.tokens) == len(left.logprobs) == 7
    part = left.part("test-1", "a", 0.0)
    second.core.update(version(2))
    second.core.take(replace(job(2), part=part))
    second.core.fill()
    assert second.core.running == 0, "with older weights it waits"
    second.core.update(version(5 if newer else 3))
    second.go(5.0)
    assert second.core.held() == [((2, 0), 5 if newer and on_update == "wait" else 12)]
    second.go()
    made = second.made[2, 0]
    assert len(made.finished.tokens) == len(made.finished.logprobs) == LENGTHS[2]
    if on_update == "wait" and newer:
        assert second.versions(2) == [(0, 5)], "one version: it began anew"
    else:
        assert second.versions(2) == ([(0, 3), (7, 5)] if newer else [(0, 3)])
        assert made.begun.seed == left.begun.seed


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=24, max_size=24),
    lookahead=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    on_update=st.sampled_from(["continue", "wait"]),
    slots=st.integers(1, 6),
)
def test_a_whole_run_ends_and_waiting_means_one_version(
    lengths: list[int], lookahead: float, on_update: str, slots: int
) -> None:
    """Iterations of four groups; a version is there once the iteration before it is made."""
    groups, iterations = 4, 6
    bench = Bench(on_update, dict(enumerate(lengths)), slots)
    admitted = trained = 0
    bench.core.update(version(0))
    while trained < iterations:
        for group in range(admitted, min(24, admissible(trained, groups, lookahead))):
            admitted = group + 1
            fields = {"iteration": iteration_of(group, groups), "predicted": float(lengths[group])}
            needs = oldest_version(group, groups, lookahead)
            bench.core.take(SampleJob(prompt(group, min_version=needs, **fields), 0))
        bench.go()
        while trained < iterations and all(
            (group, 0) in bench.made for group in range(trained * groups, (trained + 1) * groups)
        ):
            trained += 1
            bench.core.update(version(trained))
    for (group, _), one in bench.made.items():
        versions = one.begun.versions
        assert versions == sorted(set(versions))
        assert oldest_version(group, groups, lookahead) <= versions[0]
        assert versions[-1] <= iteration_of(group, groups)
        assert len(versions) == 1 or on_update == "continue"
    bench.core.fill()
    assert bench.core.version == iterations

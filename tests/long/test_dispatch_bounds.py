"""What dispatch holds does not grow with the length of a run, nor with what a report claims."""

from __future__ import annotations

import gc
import logging
import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from infra.roles.context import RoleContext
from producers.dispatch.beliefs import Beliefs
from producers.dispatch.curve import LatencyCurve
from producers.dispatch.deadline import DeadlinePolicy
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.fleet import Fleet
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import Placed, RecordPlace, SampleJob
from producers.dispatch.policies.algorithm2_policy import Algorithm2
from producers.dispatch.policies.longest_first_policy import LongestFirst
from producers.dispatch.policies.policy import Policy
from producers.dispatch.policies.random_policy import RandomFifo
from producers.dispatch.policies.round_robin_policy import RoundRobin
from schemas.messages import EVAL, DeadLetter, GeneratorReport
from schemas.wire import decode, encode
from tests.bench._lengths import CURVE
from tests.dispatching import Dispatched
from tests.factories import make_context, make_sample, make_spec
from tests.unit.test_backlog import prompt
from tests.waiting import wait_until

GROUPS, SIZE = 4, 2


def held(thing: object) -> int:
    """How many entries all containers have that an object of ours leads to."""
    seen: set[int] = set()
    todo, count = [thing], 0
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (dict, list, set, deque, tuple)):
            count += len(one)
            todo += list(one.items()) if isinstance(one, dict) else list(one)
        elif type(one).__module__.startswith("producers.dispatch"):
            todo += [getattr(one, name) for name in _names(one)]
    return count


def _names(one: object) -> list[str]:
    return [
        *getattr(one, "__dict__", {}),
        *(n for n in getattr(type(one), "__slots__", ()) if hasattr(one, n)),
    ]


class Run:
    """Iterations of fakes through a dispatcher: generators come and go, some samples are never made."""

    def __init__(self, policy: Policy) -> None:
        self.dispatcher = Dispatcher(policy, latency_s=0.1)
        self._random = random.Random(0)
        self._names = iter(range(10**9))
        self.now = 0.0

    def iterate(self, iteration: int) -> None:
        draw, dispatcher = self._random, self.dispatcher
        self._come_and_go()
        groups = range(iteration * GROUPS, (iteration + 1) * GROUPS)
        prompts = [prompt(group, predicted=float(draw.randint(10, 900))) for group in groups]
        dispatcher.admit([SampleJob(one, index) for one in prompts for index in range(SIZE)], self.now)
        given: list[SampleJob] = []
        for _ in range(3):
            self.now += 1.0
            given += [job for jobs in dispatcher.turn(self.now).values() for job in jobs]
            lost = [job for job in given if draw.random() < 0.05]
            for job in given:
                if job not in lost:
                    dispatcher.finished(job.key, draw.randint(1, 1000), self.now)
            dispatcher.finished((10**6 + iteration, 0), 5, self.now)  # of a group that nobody admitted
            given = []
            if lost and draw.random() < 0.5:
                dispatcher.again(lost[0], self.now)
        if iteration % 2:  # several are trained at once
            dispatcher.forget(range((iteration - 1) * GROUPS, (iteration + 1) * GROUPS))

    def _come_and_go(self) -> None:
        there = list(self.dispatcher.generators)
        if len(there) < 3 or self._random.random() < 0.1:
            self.dispatcher.join(f"g{next(self._names)}", 4, CURVE.table(4), self.now)
        if len(there) > 3:
            self.dispatcher.leave(self._random.choice(there), self.now)


@pytest.mark.parametrize(
    ("policy", "iterations"),
    [
        (LongestFirst(), 10_000), (RoundRobin(), 10_000), (Algorithm2(), 2_000), (RandomFifo(0), 2_000),
        (LongestFirst(GroupBeliefs(Beliefs(1000))), 2_000),
        (DeadlinePolicy(GroupBeliefs(Beliefs(1000)), replans=8, thrift=1e-9), 2_000),
    ],
    ids=["longest first", "round robin", "algorithm 2", "random", "ranks", "deadline"],
)  # fmt: skip
def test_what_is_held_is_flat(policy: Policy, iterations: int) -> None:
    run = Run(policy)
    sizes = []
    for iteration in range(iterations):
        run.iterate(iteration)
        if iteration % (iterations // 8) == iterations // 8 - 1:
            sizes.append(held(run.dispatcher))
    settled = max(sizes[:4])  # beliefs fill what they may keep
    assert max(sizes[4:]) <= 1.3 * settled + 50, sizes


class Service:
    """A dispatcher whose turns are made by hand."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        spec = make_spec(
            algorithm={"groups": GROUPS, "group_size": SIZE, "iterations": 10_000}, generator={"slots": 8},
            **sections,
        )  # fmt: skip
        self.context: RoleContext = make_context(spec, folder, role="feeder")
        self.dispatched = Dispatched(self.context)
        self.service = self.dispatched.service

    def report(self, name: str = "g", **fields: Any) -> None:
        values = {
            "run": self.context.run, "generator": name, "start": "1", "slots": 8, "batches": [1, 8],
            "seconds": [0.01, 0.02], "version": 0, "groups": np.zeros(0, np.int64),
            "indexes": np.zeros(0, np.int16), "tokens": np.zeros(0, np.int32), "returned": [],
            "leaving": False, "sent_at": 0.0,
        }  # fmt: skip
        raw = encode(GeneratorReport(**{**values, **fields}))  # type: ignore[arg-type]
        self.context.writer.send(self.context.topics.generators, raw, key=name)

    def admit(self, *groups: int, **fields: Any) -> None:
        self.dispatched.admit(
            [Placed(like_samples(group, **fields), RecordPlace(0, group)) for group in groups]
        )

    def sample(self, number: int, place: int, **fields: Any) -> None:
        length = {"length": fields.pop("length")} if "length" in fields else {}
        made = structs.replace(make_sample(self.context.spec, number, place, **length), **fields)
        self.context.writer.send(self.context.topics.samples, encode(made), key=made.id)

    def wait(self, what: str, **counters: float) -> None:
        found = self.context.heart.counters

        def look() -> bool:
            self.service.check()
            return all(found.get(name) == value for name, value in counters.items())

        wait_until(look, what=f"{what}: {counters}", deadline_s=20)

    @property
    def letters(self) -> float:
        return self.context.heart.counters.get("dead_letters", 0)


def like_samples(group: int, **fields: Any) -> Any:
    """The prompt of which `make_sample` makes samples."""
    values = {"problem_id": str(group), "tokens": np.array([4, 5], dtype=np.int32)}
    return prompt(group, **{**values, **fields})


@pytest.fixture
def service(tmp_path: Path) -> Any:
    made = Service(tmp_path)
    yield made
    made.dispatched.close()
    made.service.check()


def test_a_service_of_many_iterations_holds_what_is_open(tmp_path: Path) -> None:
    service = Service(tmp_path, dispatch={"policy": "longest_first"})
    service.report()
    service.wait("a generator", generators=1)
    sizes, said = [], service.service
    for iteration in range(300):
        groups = range(iteration * GROUPS, (iteration + 1) * GROUPS)
        service.admit(*groups)
        for group in groups:
            for index in range(SIZE):
                service.sample(group, index)
        service.sample(9_000 + iteration, 0)  # of no group that was admitted
        if iteration % 50 == 49:
            service.service.trained(iteration + 1)
            wait_until(
                lambda done=iteration + 1: said._forgotten == done and said._prompts.empty(),
                what="that it has heard of it", deadline_s=20,
            )  # fmt: skip
            service.wait("all of it", dispatched=0, undispatched=0)
            wait_until(lambda: not service.service._open, what="nothing open", deadline_s=20)
            gc.collect()
            dispatcher = service.service._dispatcher
            sizes.append(held(dispatcher) + len(service.service._unfit) + len(service.service._past.done))
    service.dispatched.close()
    assert max(sizes) <= 100, f"{sizes}: nothing stays"


def test_an_evaluation_is_open_until_it_is_done(service: Service) -> None:
    """Also when training goes on meanwhile; what is done is let go of in the end."""
    service.report()
    service.admit(-1, purpose=EVAL, iteration=0, min_version=0)
    service.wait("given", dispatched=2)
    service.service.trained(5)
    service.admit(20, min_version=0, iteration=5)
    service.wait("both", dispatched=4)
    assert -1 in service.service._open
    for index in range(2):
        service.sample(
            0, index, group=-1, problem_id="-1", bundle=-1, purpose=EVAL, iteration=0, length_class=0, mini=0
        )
    service.wait("its samples", dispatched=2)
    service.service.trained(6)
    wait_until(lambda: not service.service._open, what="nothing open", deadline_s=20)
    service.admit(-3, purpose=EVAL, iteration=6, min_version=0)
    service.wait("given", dispatched=2)
    service.service.trained(7, evaluating=[6])
    service.admit(-4, purpose=EVAL, iteration=7, min_version=0)
    service.wait("another", dispatched=4)
    service.service.trained(9, evaluating=[7])
    service.wait("only that one", dispatched=2)


UNFIT: list[dict[str, Any]] = [
    {"run": "another"}, {"prompt_tokens": np.array([9], np.int32)}, {"problem_id": "x"}, {"bundle": 77},
    {"tokens": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}, {"length": 17}, {"size": 5},
    {"versions": np.array([3], np.int32)}, {"purpose": EVAL}, {"index": 9}, {"index": -1}, {"iteration": 9},
]  # fmt: skip


def test_a_sample_that_is_not_fit_is_not_done(service: Service) -> None:
    """The trainer says so and has it made again; if it never does, it is still with who has it."""
    service.report()
    service.admit(*range(4))
    service.wait("given", dispatched=8)
    for fields in UNFIT:
        service.sample(0, 0, **fields)
    service.sample(0, 1)
    service.wait("the good one", dispatched=7)


def test_a_sample_of_a_group_that_is_not_admitted_yet_does_not_stall_it(service: Service) -> None:
    service.report()
    service.sample(1, 0)
    service.admit(0)
    service.sample(0, 0)
    service.wait("the other is done", dispatched=1)  # so the first one was read
    service.admit(1)
    service.wait("it counts now, and is not made again", dispatched=2)


HOSTILE: list[dict[str, Any]] = [
    {"slots": 2**20}, {"returned": ["xyz"]}, {"batches": [1, 2], "seconds": [1e-300, 1e300]},
    {"batches": [1], "seconds": [float("inf")]}, {"batches": [2**20, 2**30], "seconds": [1.0, 2.0]},
    {"batches": [-(2**60)], "seconds": [1.0]}, {"batches": [1] * 64, "seconds": [1.0] * 64},
    {"batches": [1] * 65, "seconds": [1.0] * 65}, {"returned": ["0000000-00", "9999999-99"]},
    {"groups": np.array([2**62], np.int64), "indexes": np.array([-5], np.int16),
     "tokens": np.array([2**31 - 1], np.int32)},
    {"groups": np.array([1], np.int64)}, {"leaving": True}, {"whole": False}, {"slots": 0}, {"slots": 2**40},
]  # fmt: skip


def test_whatever_a_report_claims_dispatch_goes_on(service: Service) -> None:
    for number, fields in enumerate(HOSTILE):
        for start in ("1", "1", "2"):
            service.report(f"liar-{number}", **{"start": start, **fields})
    service.report("good")
    service.admit(*range(100), iteration=0, min_version=0)

    def works() -> bool:
        service.service.check()
        dispatcher = service.service._dispatcher
        return "good" in dispatcher.generators and dispatcher.works("good")

    wait_until(works, what="work for the good one", deadline_s=20)
    for generator in service.service._dispatcher._board.generators.values():
        assert len(generator.seconds) <= 9, "a table has no more rows than the run file's slots"


def test_whatever_a_dead_letter_wants_dispatch_goes_on(service: Service) -> None:
    service.report()
    service.admit(0)
    service.wait("given", dispatched=2)
    for wanted in ("xyz", "1-", "999999999999999-00", "0000000-77", "0000000-00"):
        letter = DeadLetter(
            run=service.context.run, topic=service.context.topics.samples.name, partition=0, offset=7,
            reason="", raw=b"", found_by="", found_at=0.0, wanted=wanted,
        )  # fmt: skip
        service.context.writer.send(service.context.topics.dead, encode(letter), key="k")
    service.context.writer.send(service.context.topics.dead, b"garbage", key="k")
    service.wait("the one that may be wanted", made_again=1)
    service.sample(0, 0)
    service.wait("a sample", dispatched=1)
    assert service.letters == 0, "there are no letters about letters"


def test_a_report_that_says_nothing_new_costs_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 idle generators once took 1.7 s of a core each second."""
    made: list[int] = []
    table = LatencyCurve.table

    def counted(curve: LatencyCurve, slots: int) -> np.ndarray:
        made.append(slots)
        return table(curve, slots)

    monkeypatch.setattr(LatencyCurve, "table", counted)
    dispatcher = Dispatcher(LongestFirst(), latency_s=0.1)
    fleet = Fleet(dispatcher, logging.getLogger("t"), slots=256, silence_s=10.0, now=0.0)
    reports = [_report(f"g{number}") for number in range(256)]
    for one in reports:
        fleet.heard(one, 1.0)
    assert len(made) <= 2 * 256
    made.clear()
    beats = [_report(f"g{number}", whole=False, batches=[], seconds=[]) for number in range(256)]
    for second in range(2, 60):
        for one in beats + reports:
            fleet.heard(one, float(second))
        fleet.bury_the_silent(float(second))
    assert len(fleet) == 256 and not made


def test_the_processes_that_were_replaced_are_remembered_up_to_a_bound() -> None:
    fleet = Fleet(Dispatcher(LongestFirst()), logging.getLogger("t"), slots=4, silence_s=10.0, now=0.0)
    fleet._log.setLevel(logging.ERROR)
    for number in range(6000):
        fleet.heard(_report("g", start=str(number)), float(number))
    assert len(fleet) == 1 and len(fleet._former) <= 4096
    fleet.heard(_report("g", start="5998"), 6001.0)
    assert fleet.is_there(("g", "5999"))


def _report(name: str, **fields: Any) -> GeneratorReport:
    values: dict[str, Any] = {
        "run": "r", "generator": name, "start": "1", "slots": 256, "batches": [1, 256],
        "seconds": [0.01, 0.05], "version": 0, "groups": np.zeros(0, np.int64),
        "indexes": np.zeros(0, np.int16), "tokens": np.zeros(0, np.int32), "returned": [], "leaving": False,
        "sent_at": 0.0,
    }  # fmt: skip
    return decode(encode(GeneratorReport(**{**values, **fields})), GeneratorReport)


@pytest.mark.parametrize("fast_s", [0.0, 100.0, -100.0])
def test_the_way_there_and_back_is_known_whatever_the_clocks_say(fast_s: float) -> None:
    dispatcher = Dispatcher(LongestFirst(), latency_s=0.1)
    fleet = Fleet(dispatcher, logging.getLogger("t"), slots=256, silence_s=10.0, now=0.0)
    fleet.heard(_report("g", jobs_late_s=0.2 + fast_s), 1.0)
    generator = dispatcher._board.generators["g"]
    for _ in range(200):
        fleet.finished("g", 0.1 - fast_s)
    assert generator.round_s == pytest.approx(0.3)
    fleet.finished("g", 1e300)  # a sample may say anything
    assert 0.0 <= generator.round_s <= 5.0
    for _ in range(200):
        fleet.finished("g", 0.1 - fast_s)
    assert generator.round_s == pytest.approx(0.3, abs=0.05)
    fleet.finished("nobody", 1.0)

"""A run's balance is kept: each change is acted on, recorded, shown, and remembered by the next start."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from flows.balancing.balancer import Verdict
from flows.balancing.keeper import BalanceBook, BalanceKeeper
from flows.balancing.staff import CannotChange
from flows.monitoring.run_figures import run_figures
from flows.page.topic_facts import facts_from, facts_of
from flows.run.commands import FEEDER, GENERATOR, TRAINER, Worker, own_numbers, workers
from flows.run.dealt_gpus import DealtGpus
from flows.run.gpu_claims import GpuClaims
from flows.run.locations import Places
from flows.run.run_balance import LocalGenerators, RunBalance
from flows.run.supervision import RunProcesses
from flows.run.watching_balance import BalanceError, NewestActs, rule_for, verdict_now
from flows.view.balance_words import verdict_in_words
from flows.view.run_view import RunView
from infra.bus import BusError
from infra.epochs import Replaced
from infra.memory_bus import MemoryBus
from infra.roles.context import RoleContext
from infra.runs import RunRecord
from infra.supervise.team import Ended
from schemas.balancing import BalanceSection
from schemas.messages import BalanceRecord
from schemas.topics import Topic
from schemas.wire import Message, encode
from tests.factories import make_context, make_spec
from tests.unit.test_crew import Clock, FakeTeam, ended
from tests.unit.test_side_times import beat, step

RULE = BalanceSection(most=3, smoothed=1, lasting=1, settle=0)
SLOW = make_spec(generator={"slots": 4}, placement={"generators": 1, "balance": RULE.model_dump()})


class Hired:
    """Changes nothing but a number."""

    acts = True

    def __init__(self, fails: str = "") -> None:
        self.count, self.fails = 1, fails

    def grow(self) -> None:
        self._change(1)

    def shrink(self) -> None:
        self._change(-1)

    def _change(self, by: int) -> None:
        if self.fails:
            raise CannotChange(self.fails)
        self.count += by


class Watched:
    """A keeper that sees generators take `gen_s` of each ten seconds."""

    def __init__(self, rule: BalanceSection = RULE, staff: Hired | None = None, **options: Any) -> None:
        self.staff, self.said = staff or Hired(), list[str]()
        self.book: list[BalanceRecord] = []
        self.keeper = BalanceKeeper(
            SLOW, rule, self.staff, options.pop("write", self.book.append), run="test-1",
            decided_by="the test", say=self.said.append, **options,
        )  # fmt: skip
        self._number, self._busy = 0, dict[int, float]()
        self._take(step(0, 10.0))

    def _take(self, *messages: Any) -> None:
        for message in messages:
            self.keeper.take(message)

    def iterate(self, gen_s: float, generators: int | None = None) -> list[BalanceRecord]:
        self._number += 1
        end = 10.0 * (self._number + 1)
        self._take(step(self._number, end))
        for number in range(generators or self.staff.count):
            busy = self._busy[number] = self._busy.get(number, 0.0) + gen_s
            waited = end - busy
            self._take(
                beat(end, number, causes={"generating": busy, "wait: weights": waited},
                     counters={"version": 0.0, "full_s": busy, "slot_s": 4 * busy})
            )  # fmt: skip
        return self.keeper.tick()


def test_a_change_is_acted_on_recorded_and_said() -> None:
    watched = Watched()
    (one,) = watched.iterate(8.0)
    assert (one.before, one.after, one.dry, one.iteration) == (1, 2, False, 1)
    assert one.gen_s == pytest.approx(8) and one.train_s == pytest.approx(2)
    assert one.delta_s == pytest.approx(6) and one.gain_s == pytest.approx(4)
    assert watched.staff.count == 2 and watched.book == [one]
    (said,) = watched.said
    assert said == (
        "balance: after iteration 1 the run gets 2 generators rather than 1: generating takes 8.0 s an "
        "iteration and training 2.0 s: one generator more saves 4.0 s of the difference of 6.0 s"
    )


def test_no_step_is_held_until_somebody_looks() -> None:
    watched, one = Watched(), step(1, 20.0)
    array = weakref.ref(one.groups)
    watched.keeper.take(one)
    del one
    assert array() is None


def test_what_can_not_be_done_is_said_and_not_recorded() -> None:
    watched = Watched(staff=Hired("no machine is free"))
    assert not watched.iterate(8.0) and not watched.book
    assert watched.said == ["the number of generators stays 1: no machine is free"]


def test_a_generator_that_does_not_come_is_waited_for_as_long_as_a_start_may_take() -> None:
    clock = Clock()
    watched = Watched(clock=clock)
    assert watched.iterate(8.0)
    assert not [one for _ in range(30) for one in watched.iterate(8.0, generators=1)]
    clock.now += SLOW.deadlines.start_s + 1
    assert watched.iterate(8.0, generators=1)


@pytest.mark.parametrize("seconds", [10.0, 150.0, 700.0])
def test_a_generator_that_saves_nothing_is_taken_back_however_long_an_iteration_takes(seconds: float) -> None:
    clock = Clock()
    watched = Watched(BalanceSection(most=8), clock=clock)
    counts = list[int]()
    for _ in range(20):
        clock.now += seconds
        watched.iterate(8.0)
        counts.append(watched.staff.count)
    assert max(counts) == 2 and counts[-1] == 1
    assert "saves" in watched.book[-1].reason


def test_a_broker_that_is_away_costs_the_record_and_not_the_run() -> None:
    def write(found: BalanceRecord) -> None:
        raise BusError("the broker is away")

    watched = Watched(write=write)
    assert watched.iterate(8.0) and watched.staff.count == 2
    assert watched.said[0] == "a change of balance is not on record: the broker is away"


def test_dry_recommends_once_and_starts_nothing() -> None:
    watched = Watched(RULE.model_copy(update={"dry": True}))
    found = [one for _ in range(5) for one in watched.iterate(8.0)]
    assert [one.after for one in found] == [2] and found[0].dry and watched.staff.count == 1
    assert "should have 2 generators rather than 1" in watched.said[0]


@pytest.fixture
def context(tmp_path: Path) -> RoleContext:
    return make_context(SLOW, tmp_path)


def book_of(context: RoleContext) -> BalanceBook:
    return BalanceBook(context.record, lambda record, name: context.bus)


def test_the_book_outlives_the_process_and_other_records_are_passed_over(context: RoleContext) -> None:
    book, watched = book_of(context), Watched()
    (one,) = watched.iterate(8.0)
    assert isinstance(context.bus, MemoryBus)
    context.bus.append(context.topics.balance, 0, b"x", b"garbage")
    book.write(one)
    assert book.read() == [one]


def test_a_run_of_an_older_release_gets_the_topic(context: RoleContext) -> None:
    context.bus.delete_topics([context.topics.balance.name])
    assert book_of(context).read() == []
    assert context.topics.balance.name in context.bus.topic_names()


def recorded(before: int, after: int, *, dry: bool = False) -> BalanceRecord:
    return BalanceRecord(
        run="test-1", iteration=5, gen_s=4.0, train_s=2.0, gain_s=1.0, before=before, after=after, dry=dry,
        reason="so", decided_by="the run", decided_at=1e9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("past", "expected"),
    [
        ([], 1),
        ([recorded(1, 2)], 2),
        ([recorded(1, 2), recorded(2, 3)], 3),
        ([recorded(1, 2), recorded(2, 3), recorded(3, 2)], 2),
        ([recorded(1, 2), recorded(2, 3, dry=True)], 2),
        ([recorded(1, 2), recorded(2, 3), recorded(3, 4)], 3),  # the run file says now: at most three
        ([recorded(5, 6)], 2),  # four had joined by themselves, and come back by themselves
    ],
)
def test_a_resumed_run_goes_on_with_the_number_it_had(
    context: RoleContext, monkeypatch: pytest.MonkeyPatch, past: list[BalanceRecord], expected: int
) -> None:
    monkeypatch.setattr("flows.run.run_balance.BalanceBook", lambda record: book_of(context))
    for one in past:
        book_of(context).write(one)
    assert RunBalance(context.record).generators == expected
    found = workers(context.record, Places("b", "file:///s"), DealtGpus(()), expected)
    assert sum(one.role == GENERATOR for one in found) == expected


@pytest.mark.parametrize("dry", [False, True])
def test_a_start_that_balances_itself_ends_a_balancer_from_outside(
    context: RoleContext, monkeypatch: pytest.MonkeyPatch, dry: bool
) -> None:
    monkeypatch.setattr("flows.run.run_balance.BalanceBook", lambda record: book_of(context))
    staff = Hired()
    outside = NewestActs(staff, context.store, context.run)
    outside.grow()
    placement = {"generators": 1, "balance": RULE.model_dump() | {"dry": dry}}
    record = context.record.model_copy(update={"spec": make_spec(placement=placement)})
    RunBalance(record).keeper(None, Places("b", context.store.url), None, print)  # type: ignore[arg-type]
    if dry:
        outside.shrink()
        return
    with pytest.raises(Replaced, match="start 1 of the balancer"):
        outside.shrink()
    assert staff.count == 2


@pytest.mark.parametrize("generators", [0, 2])
def test_nothing_is_started_for_a_site_without_generators(tmp_path: Path, generators: int) -> None:
    record = make_context(
        make_spec(placement={"generators": 1, "sites": {"far": {"generators": generators}}}), tmp_path
    ).record
    found = workers(record, Places("b", "file:///s"), DealtGpus(()), 1)
    assert sum("--site" in one.argv for one in found) == (generators + 1 if generators else 0)


def test_without_balance_nothing_is_read_or_kept(tmp_path: Path) -> None:
    record = make_context(make_spec(), tmp_path).record  # its broker is nowhere
    balance = RunBalance(record)
    assert balance.generators == 1
    keeper = balance.keeper(None, None, None, print)  # type: ignore[arg-type]
    keeper.take(step(0, 1.0))
    assert keeper.tick() == []


class StoppingTeam(FakeTeam):
    def __init__(self) -> None:
        super().__init__()
        self.stopped: list[str] = []

    def stop(self, name: str, grace_s: float) -> None:
        self.stopped.append(name)


def crew_of(record: RunRecord, team: StoppingTeam, said: list[str]) -> RunProcesses:
    found = [Worker(role, role, ["python"], {}) for role in (TRAINER, FEEDER)]
    found.append(Worker("generator-0", GENERATOR, ["python"], {}))
    crew = RunProcesses(team, found, restarts=3, say=said.append, clock=Clock())  # type: ignore[arg-type]
    crew.start()
    return crew


def test_local_generators_come_with_free_numbers_and_the_highest_leaves(context: RoleContext) -> None:
    team, said = StoppingTeam(), list[str]()
    crew = crew_of(context.record, team, said)
    local = LocalGenerators(crew, context.record, Places("b", "file:///s"), GpuClaims())
    for _ in range(2):
        local.grow()
    crew.start_again()
    assert team.started[-2:] == ["generator-1", "generator-2"]
    local.shrink()
    assert team.stopped == ["generator-2"] and crew.generators == ["generator-0", "generator-1"]
    local.grow()  # while the one that leaves is still there
    crew.start_again()
    assert team.started[-1] == "generator-3"
    crew.heard(ended("generator-2", code=3))
    crew.start_again()
    assert "generator-2 has left the run" in said and team.started.count("generator-2") == 1
    assert "generator-2" not in crew.left_out


def test_none_is_added_while_one_can_not_be_kept_alive(context: RoleContext) -> None:
    team = StoppingTeam()
    crew = crew_of(context.record, team, [])
    for _ in range(4):
        crew.heard(ended("generator-0", code=1))
    with pytest.raises(CannotChange, match="generator-0 can't be kept alive"):
        LocalGenerators(crew, context.record, Places("b", "file:///s"), GpuClaims()).grow()


def test_who_leaves_may_be_killed_and_is_not_started_again(context: RoleContext) -> None:
    team, said = StoppingTeam(), list[str]()
    crew = crew_of(context.record, team, said)
    crew.retire("generator-0", 1.0)
    crew.heard(ended("generator-0", signal=9))
    crew.start_again()
    crew.check()
    assert team.started.count("generator-0") == 1 and said[-1] == "generator-0 has left the run"


def test_a_pause_starts_all_anew_but_who_was_leaving(context: RoleContext) -> None:
    class Obeying(StoppingTeam):
        def poll(self, wait_s: float) -> list[Ended]:
            return [ended(name, code=3) for name in self.stopped if self.running.pop(name, None)]

    team, said = Obeying(), list[str]()
    crew = crew_of(context.record, team, said)
    crew.retire("generator-0", 1.0)
    crew.dismiss(1.0)
    assert not team.running and crew.names == ["trainer", "feeder"]
    crew.start()
    assert sorted(team.running) == ["feeder", "trainer"] and not said


def test_no_generator_of_its_own_can_leave(context: RoleContext) -> None:
    team = StoppingTeam()
    crew = crew_of(context.record, team, [])
    crew.retire("generator-0", 1.0)
    with pytest.raises(CannotChange, match="no generator of its own"):
        LocalGenerators(crew, context.record, Places("b", "file:///s"), GpuClaims()).shrink()


def test_numbers_of_own_generators_and_of_sites_are_apart() -> None:
    assert own_numbers(4, first=2, at_sites=3) == [0, 1, 5, 6]
    assert own_numbers(1, first=2, at_sites=3) == [0]


def test_it_is_seen_on_the_page_and_by_prometheus() -> None:
    view = RunView("test-1", SLOW)
    assert view.wanted_generators == 0
    for one in (recorded(1, 2), recorded(2, 3)):
        view.take(one)
    assert view.wanted_generators == 3
    figures = {one.name: one.samples[0].value for one in run_figures(view, 0.0) if one.samples}
    assert figures["streamrl_run_wanted_generators"] == 3
    facts = facts_from(facts_of(view).as_json())
    assert facts is not None and [one["generators"] for one in facts.balance] == ["1 → 2", "2 → 3"]
    assert RunView("test-1", make_spec()).wanted_generators is None


def test_the_verdict_on_a_run_as_it_is_now(context: RoleContext) -> None:
    def send(topic: Topic, *messages: Message) -> None:
        for message in messages:
            context.writer.send(topic, encode(message), key="k")

    def now() -> Verdict:
        return verdict_now(context.record, RULE, connected=lambda record, name: context.bus)

    with pytest.raises(BalanceError, match="no whole iteration with its heartbeats yet: look again"):
        now()
    for number in range(3):
        end = 10.0 * (number + 1)
        send(context.topics.ledger, step(number, end))
        busy = 8.0 * (number + 1)
        full = {"version": 0.0, "full_s": busy, "slot_s": 4 * busy}
        send(context.topics.status, beat(end, causes={"generating": busy, "x": end - busy}, counters=full))
    verdict = now()
    assert (verdict.iteration, verdict.before, verdict.after) == (2, 1, 2)
    assert "after iteration 2 there should be 2 generators rather than 1" in verdict_in_words(
        verdict.iteration, verdict.before, verdict.after, verdict.reason
    )


def test_rules_for_a_run_that_was_started_elsewhere(tmp_path: Path, context: RoleContext) -> None:
    plain = make_context(make_spec(), tmp_path / "plain").record
    assert rule_for(plain, dry=False, most=4, least=None).most == 4
    with pytest.raises(BalanceError, match="say how many at most"):
        rule_for(plain, dry=True)
    with pytest.raises(BalanceError, match="least is 5 and most is 4"):
        rule_for(plain, dry=True, most=4, least=5)
    with pytest.raises(BalanceError, match="balances itself"):
        rule_for(context.record, dry=False)
    assert rule_for(context.record, dry=True).most == 3

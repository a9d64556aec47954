"""Keeps a run balanced that was started elsewhere: watches its topics, and adds or takes back generators.

The generators are processes on this machine that join the run, or flow runs of a Prefect deployment. One that
the run itself has started is never stopped from here.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pydantic import ValidationError

from flows.balancing.balancer import Balancer, Verdict
from flows.balancing.keeper import BalanceBook, BalanceKeeper
from flows.balancing.side_times import SideTimes
from flows.balancing.staff import BALANCER, LEAVING_S, CannotChange, NoGenerators, Staff
from flows.run.gpu_claims import GpuClaims
from flows.run.joining import join_logs, joining_generator
from flows.run.request import RunFailed
from flows.run.run_outlook import RunOutlook
from flows.run.supervision import RunProcesses
from flows.view.follow import Follower
from infra import epochs
from infra.bus import Bus
from infra.errors import Explained
from infra.run_bus import connect
from infra.runs import RunRecord
from infra.stores.opening import open_store
from infra.stores.store import Store
from infra.supervise.team import Team
from schemas.balancing import BalanceSection
from schemas.messages import BalanceRecord

_TICK_S, _LOOK_S = 0.5, 30.0


class BalanceError(Explained):
    """A run can't be balanced from here; the message says why, and what to do."""

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(f"{message}: {fix}")


class JoinedGenerators:
    """Generators that join a run from this machine, one by one."""

    acts = True

    def __init__(self, crew: RunProcesses, record: RunRecord, store: str, claims: GpuClaims) -> None:
        self._crew, self._record, self._store, self._claims = crew, record, store, claims
        self._places: dict[str, int] = {}  # by the name of a generator: which of the claimed GPUs it has

    def grow(self) -> None:
        """Start one, with a number that no other generator has."""
        there = set(self._crew.names)
        self._places = {name: place for name, place in self._places.items() if name in there}
        place = next(one for one in itertools.count() if one not in self._places.values())
        try:
            fresh = joining_generator(self._record, self._store, self._claims, place)
        except Explained as error:
            raise CannotChange(f"no generator can join from here: {error}") from error
        self._places[fresh.name] = place
        self._crew.add(fresh)

    def shrink(self) -> None:
        """Have one of them leave."""
        if not (own := self._crew.generators):
            raise CannotChange("no generator of this machine is left, and others are not stopped from here")
        self._crew.retire(random.choice(own), LEAVING_S)


class NewestActs:
    """A staff that only the newest balancer of a run commands: together, two could pass the most.

    A start of a run that balances itself counts as one.
    """

    acts = True

    def __init__(self, staff: Staff, store: Store, run: str) -> None:
        self._staff, self._start = staff, epochs.begin(store, run, BALANCER)

    def grow(self) -> None:
        """Add a generator. Raises Replaced if a newer balancer of the run was started anywhere."""
        self._start.check()
        self._staff.grow()

    def shrink(self) -> None:
        """Have a generator leave. Raises Replaced likewise."""
        self._start.check()
        self._staff.shrink()


def rule_for(record: RunRecord, *, dry: bool, **given: Any) -> BalanceSection:
    """Return the settings to balance a run by: its own, changed by those that are given."""
    known = record.spec.placement.balance
    if known is not None and not known.dry and not dry:
        raise BalanceError(
            f"run {record.id} balances itself (placement.balance), and two may not do so at once",
            fix="recommend only (dry), or resume the run without placement.balance",
        )
    said = {name: value for name, value in given.items() if value is not None}
    if known is None and "most" not in said:
        raise BalanceError(
            f"run {record.id} has no placement.balance, so nothing says how many generators it may have",
            fix="say how many at most (most)",
        )
    values = (known.model_dump() if known is not None else {}) | said | {"dry": dry}
    try:
        return BalanceSection.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "least and most"
        raise BalanceError(
            f"run {record.id} can't be balanced by these settings", fix=f"{where}: {first['msg']}"
        ) from error


def verdict_now(
    record: RunRecord, rule: BalanceSection, *, connected: Callable[[RunRecord, str], Bus] = connect
) -> Verdict:
    """Return the verdict on a run as its topics show it now. Raises BalanceError if they show too little."""
    times = SideTimes(record.spec)
    with Follower(record, also=times.take, connected=connected) as follower:
        follower.wait_for(lambda view: view.live, _LOOK_S)
        trouble = follower.see(lambda view: view.trouble)
    balancer, verdict = Balancer(rule.model_copy(update={"dry": True})), None
    for one in times.ready():
        verdict = balancer.observe(
            one.iteration, one.gen_s, one.train_s, one.generators, more_s=one.more_s, fewer_s=one.fewer_s,
            tokens=one.tokens,
        )  # fmt: skip
    if verdict is None:
        raise BalanceError(
            f"the topics of run {record.id} show no whole iteration with its heartbeats yet"
            + (f" ({trouble})" if trouble else ""),
            fix="look again after two iterations",
        )
    return verdict


def keep_balanced(
    record: RunRecord, rule: BalanceSection, *, store: str, say: Callable[[str], None], decided_by: str,
    called: Staff | None = None, tick: Callable[[list[BalanceRecord]], None] = lambda decided: None,
) -> list[BalanceRecord]:  # fmt: skip
    """Keep a run balanced until it has ended, but not while it is paused. Returns what was decided.

    No process is left. Raises Replaced if a newer balancer of the run was started, and it would act.
    `called`: generators that are called by `rule.deployment`, if it is set.
    """
    book, found, origin = BalanceBook(record), list[BalanceRecord](), open_store(record.store)
    with ExitStack() as stack:
        claims = stack.enter_context(GpuClaims())
        team = Team(join_logs(record), holds=claims.descriptors)
        crew = RunProcesses(team, [], restarts=record.spec.placement.restarts, say=say)
        staff = _staff(record, rule, crew, store, claims, called, origin)
        keeper = BalanceKeeper(
            record.spec, rule, staff, book.write, book.read(),
            run=record.id, decided_by=decided_by, say=say, since=time.time(),
        )  # fmt: skip
        stack.enter_context(team)
        follower = stack.enter_context(Follower(record, also=keeper.take))
        follower.wait_for(lambda view: view.live, _LOOK_S)
        outlook, paused = RunOutlook(origin, record), False

        def is_over() -> bool:
            follower.see(lambda view: outlook.hear(one.beat for one in view.processes.values()))
            return outlook.is_over()

        if is_over():
            raise RunFailed(f"run {record.id} has ended or was stopped, so there is nothing to balance")
        while not is_over():
            if outlook.is_paused() != paused:
                paused = not paused
                if paused:
                    say(f"run {record.id} is paused: its balance waits until it goes on")
                    crew.dismiss(LEAVING_S)
                else:
                    crew.start()
            crew.poll(_TICK_S)
            if paused:
                continue
            crew.start_again()
            crew.check(others=lambda: True)
            outlook.check_heard()
            found += (decided := keeper.tick())
            tick(decided)
    return found


def _staff(
    record: RunRecord, rule: BalanceSection, crew: RunProcesses, store: str, claims: GpuClaims,
    called: Staff | None, origin: Store,
) -> Staff:  # fmt: skip
    if rule.dry:
        return NoGenerators()
    return NewestActs(called or JoinedGenerators(crew, record, store, claims), origin, record.id)

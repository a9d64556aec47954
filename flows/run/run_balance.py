"""The balance of a run that is trained here: with how many generators it goes on, and who changes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from flows.balancing.keeper import BalanceBook, BalanceKeeper
from flows.balancing.staff import BALANCER, LEAVING_S, CannotChange, NoGenerators, Staff
from flows.run.commands import GENERATOR, own_numbers, with_env, worker
from flows.run.dealt_gpus import DealtGpus
from flows.run.gpu_claims import GpuClaims
from flows.run.locations import Places
from flows.run.request import RunFailed
from flows.run.supervision import RunProcesses
from infra import epochs
from infra.runs import RunRecord
from schemas.messages import BalanceRecord
from schemas.wire import Message

_BY_THE_RUN = "the run"  # decided a change: not a balancer outside it


class _Keeper(Protocol):
    """Hears a run's messages, and acts now and then."""

    def take(self, message: Message) -> None:
        """Take a message of any topic of the run."""

    def tick(self) -> list[BalanceRecord]:
        """Act, if it is time. Return what was decided."""


class _NoKeeper:
    """Keeps no balance: the run file asks for none."""

    def take(self, message: Message) -> None:
        """Do nothing."""

    def tick(self) -> list[BalanceRecord]:
        return []


class RunBalance:
    """The balance of one start of a run."""

    def __init__(self, record: RunRecord) -> None:
        self._record, self._rule = record, record.spec.placement.balance
        self._book = BalanceBook(record)
        self._past = self._book.read() if self._rule is not None else []

    @property
    def generators(self) -> int:
        """How many generators at no site it begins with: as they were left, or as the file says."""
        if not self._record.spec.generates:
            return 0
        placement = self._record.spec.placement
        done = [one for one in self._past if not one.dry]
        if self._rule is None or self._rule.dry or self._rule.deployment or not done:
            return placement.generators
        at_sites = sum(planned.generators for planned in placement.sites.values())
        # a record counts those that joined, too: only the changes are those of its own generators
        came = sum(one.after - one.before for one in done if one.decided_by == _BY_THE_RUN)
        there = placement.generators + came + at_sites
        return max(0, min(max(there, self._rule.least), self._rule.most) - at_sites)

    def keeper(
        self, crew: RunProcesses, places: Places, claims: GpuClaims, say: Callable[[str], None],
        called: Staff | None = None,
    ) -> _Keeper:  # fmt: skip
        """Return who keeps the balance. `crew`: the run's processes on this machine; `claims`: their GPUs.

        `called`: generators that the run's host calls, by `placement.balance.deployment`.
        """
        if self._rule is None:
            return _NoKeeper()
        staff: Staff = NoGenerators()
        if self._rule.deployment:
            if called is not None:
                staff = called
            else:
                say("only Prefect can call placement.balance.deployment, and the run goes on without it: "
                    "changes of the number of its generators are only recommended")  # fmt: skip
        elif not self._rule.dry:
            staff = LocalGenerators(crew, self._record, places, claims)
        if staff.acts:  # a `streamrl rebalance` that watches since before this start must not act any more
            epochs.begin(places.open_store(), self._record.id, BALANCER)
        return BalanceKeeper(
            self._record.spec, self._rule, staff, self._book.write, self._past, run=self._record.id,
            decided_by=_BY_THE_RUN, say=say, since=time.time(),
        )  # fmt: skip


class LocalGenerators:
    """Generators that are processes of the run on this machine."""

    acts = True

    def __init__(self, crew: RunProcesses, record: RunRecord, places: Places, claims: GpuClaims) -> None:
        self._crew, self._record, self._places, self._claims = crew, record, places, claims

    def grow(self) -> None:
        """Start a generator, with the lowest number that is free."""
        if dead := [name for name in self._crew.generators if name in self._crew.left_out]:
            raise CannotChange(f"{dead[0]} can't be kept alive, and another one would hardly be")
        placement, there = self._record.spec.placement, set(self._crew.names)
        at_sites = sum(planned.generators for planned in placement.sites.values())
        for place, number in enumerate(own_numbers(len(there) + 1, placement.generators, at_sites)):
            fresh = worker(GENERATOR, number, self._record, self._places)
            if fresh.name not in there:
                try:
                    gpus = self._claims.deal(DealtGpus.of_run(self._record.spec), place + 1)
                except RunFailed as error:
                    raise CannotChange(str(error)) from error
                self._crew.add(with_env(fresh, gpus.for_generator(place)))
                return

    def shrink(self) -> None:
        """Have the generator with the highest number leave."""
        own = [name for name in self._crew.generators if "--site" not in self._crew.command(name)]
        if not own:
            raise CannotChange("the run has no generator of its own on this machine that could leave")
        self._crew.retire(max(own, key=lambda name: int(name.rpartition("-")[2])), LEAVING_S)

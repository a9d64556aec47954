"""Keeps a simulated run balanced by the code that keeps a run balanced, which sees no difference.

simulated seconds ──► heartbeats, steps ──► BalanceKeeper: SideTimes ──► Balancer ──► the fleet changes

At the end of each step the ledger's record comes, and a heartbeat of each process that is there: the messages
that a run's own keeper computes both sides' times from. Nobody writes them anywhere.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from flows.balancing.keeper import BalanceKeeper
from flows.balancing.staff import CannotChange
from flows.simulation.simulated_fleet import SimulatedFleet
from flows.simulation.simulated_generator import SimulatedGenerator
from flows.simulation.simulated_learner import SimulatedLearner
from flows.simulation.simulated_run import SimulatedRun
from flows.simulation.simulation_result import SimulatedChange, Simulation
from producers.engines.engine import Pace
from producers.engines.without_model import VirtualClock
from schemas.messages import WAIT, BalanceRecord, Heartbeat, StepRecord
from schemas.runspec import RunSpec

_CAUSES = {  # of a simulated process, as the heartbeat of a real one names them
    "drawing": "generating",
    "drawing the tail": "generating the long tail",
    "prefilling": "generating",
    "installing": "installing weights",
    "training": "training",
    "stepping": "stepping",
    "waiting for samples": f"{WAIT}samples",
}


class _SimulatedStaff:
    """The generators of one site of a simulated run."""

    acts = True

    def __init__(self, fleet: SimulatedFleet, site: str, most: int | None) -> None:
        self._fleet, self._site, self._most = fleet, site, most

    def grow(self) -> None:
        """Start a generator, if a machine has room for it."""
        if self._most is not None and len(self._fleet.wanted(self._site)) >= self._most:
            raise CannotChange(f"the machines of {self._site} have room for {self._most}")
        self._fleet.grow(self._site)

    def shrink(self) -> None:
        """Have the newest generator leave."""
        if not self._fleet.shrink(self._site):
            raise CannotChange(f"{self._site} has no generator that could leave")


class SimulatedBalance:
    """The balance of a simulated run."""

    def __init__(
        self, run: SimulatedRun, spec: RunSpec, fleet: SimulatedFleet, learner: SimulatedLearner,
        clock: VirtualClock, attended: float, result: Simulation,
    ) -> None:  # fmt: skip
        """`attended`: tokens that a sample attends to, on the average. `result` gets all that is decided."""
        assert run.balance is not None
        site = next(one for one in run.sites if one.name == run.balanced or not run.balanced)
        self._fleet, self._learner, self._clock, self._attended = fleet, learner, clock, attended
        self._result = result
        self._before = dict(learner.seconds)
        self._said_goodbye: dict[int, int] = {}  # by place, the last process whose end was told
        self._keeper = BalanceKeeper(
            spec, run.balance, _SimulatedStaff(fleet, site.name, site.most), self._decided, run="simulated",
            decided_by="the simulation", say=lambda line: result.said.append((clock.time, line)),
            clock=lambda: clock.time,
        )  # fmt: skip

    def stepped(self, record: StepRecord, tokens: int) -> None:
        """Take a step that was just done, with the tokens of its answers, and act if that is due."""
        spent = {cause: seconds - self._before[cause] for cause, seconds in self._learner.seconds.items()}
        self._before = dict(self._learner.seconds)
        self._keeper.take(_whole(record, tokens, self._result.group_size, self._clock.time, spent))
        now = self._clock.time
        self._keeper.take(self._heartbeat("trainer", 0, 0, now, self._learner.seconds, {}))
        for generator in self._fleet.places:
            if generator.is_there:
                self._keeper.take(self._generator(generator, now))
            elif self._said_goodbye.get(generator.place, 0) != generator.left == generator.process:
                self._said_goodbye[generator.place] = generator.left
                self._keeper.take(replace(self._generator(generator, generator.left_at), state="ended"))
        self._keeper.tick()

    def _generator(self, generator: SimulatedGenerator, at: float) -> Heartbeat:
        generator.spend()
        seconds, slot_s, full_s, made = generator.of_process()
        curve = generator.seconds_by_batch(self._attended)[1:].tolist()
        step_s, sample_s = Pace(list(range(1, len(curve) + 1)), curve).line()
        counters = {
            "version": float(generator.decoding.version), "made": float(made), "slot_s": slot_s,
            "full_s": full_s, "step_s": step_s, "sample_s": sample_s,
        }  # fmt: skip
        return self._heartbeat("generator", generator.place, generator.process, at, seconds, counters)

    def _heartbeat(
        self, role: str, number: int, process: int, at: float, seconds: dict[str, float],
        counters: dict[str, float],
    ) -> Heartbeat:  # fmt: skip
        causes: dict[str, float] = {}
        for cause, spent in seconds.items():
            name = _CAUSES.get(cause, f"{WAIT}{cause.removeprefix('waiting for ')}")
            if cause != "away":
                causes[name] = causes.get(name, 0.0) + spent
        return Heartbeat(
            run="simulated", role=role, number=number, pid=process, host="simulated", state="generating",
            waits_for="", unblocked_by="", since=at, counters=counters, sent_at=at, causes=causes,
        )  # fmt: skip

    def _decided(self, found: BalanceRecord) -> None:
        self._result.changes.append(
            SimulatedChange(
                self._clock.time, found.iteration, found.gen_s, found.train_s, found.gain_s, found.before,
                found.after, found.dry, found.reason,
            )
        )  # fmt: skip


def _whole(
    record: StepRecord, tokens: int, group_size: int, now: float, spent: dict[str, float]
) -> StepRecord:
    """Return a step's record with what a keeper reads of it: its samples, their tokens, and seconds."""
    groups = np.repeat(record.groups, group_size)
    lengths = np.zeros(len(groups), np.int64)
    lengths[0] = tokens  # it needs the sum alone
    metrics = {
        "compute_s": spent["training"] + spent["stepping"], "waited_s": spent["waiting for samples"]
    }  # fmt: skip
    return replace(record, groups=groups, lengths=lengths, metrics=metrics, finished_at=now)

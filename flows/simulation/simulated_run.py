"""A run to simulate: the run file, how fast its parts are, what it meets, and what goes wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flows.planning.preemption import Preemption
from flows.planning.stage_times import EngineTimes, LearnerTimes, LinkTimes
from flows.planning.workload import DrawnLengths, Workload
from infra.errors import Explained
from schemas.algorithm import AlgorithmSection
from schemas.balancing import BalanceSection
from schemas.runspec import RunSpec


class SimulationError(Explained):
    """A run can't be simulated as it is described, or comes to a standstill."""


@dataclass(frozen=True)
class SimulatedSite:
    """Generators of one place."""

    name: str
    engines: tuple[EngineTimes, ...]
    link: LinkTimes | None = None  # from the run's store; None: the store is here
    price_per_hour: float = 0.0  # of one generator, while its machine is there
    most: int | None = None  # generators that its machines have room for; None: any number
    cores: float | None = None  # that its engines share with nobody else; None: they are on the run's
    preemption: Preemption | None = None  # of its machines; None: they stay
    machine_generators: int = 1  # that stand on one machine, and are taken away together


@dataclass(frozen=True)
class Outage:
    """A generator dies, and its unfinished samples are drawn again elsewhere.

    With enough of a notice it leaves at once, and hands over what it has begun.
    """

    generator: int  # its place among the generators of all sites, counted from 0
    at_s: float  # when the notice comes; without one, when it dies
    back_after_s: float = math.inf  # from then until another process is ready there; inf: none comes
    notice_s: float = 0.0  # it is told so long before; 0: it is missed after dispatch.silence_s


@dataclass(frozen=True)
class MessageTimes:
    """Seconds that messages and decisions take."""

    delivery_s: float = 0.0  # until a job reaches its generator, or a sample the trainer and the dispatcher
    handover_s: float = 0.3  # until a running sample is with the generator that goes on with it
    turn_s: float = 0.0  # of the dispatcher for each turn that gives jobs
    choice_s: float | None = None  # until a chosen plan is there; None: as is usual for so many jobs
    measured: bool = False  # take turns and choices to be as long as this machine needs: not repeatable


@dataclass(frozen=True)
class SimulatedRun:
    """A run to simulate.

    `cores`: that the learner shares with the engines of sites without cores of their own; None: nobody waits
    for one.
    `colocated`: engines and learner take turns, since only one of them fits; `switch_s` from one to the
    other.
    `barrier`: all stand still at the end of an iteration until new weights are everywhere: the one-step
    pipeline that the StreamRL paper compares with. It needs mode async and order window.
    `balance`: the number of generators is changed by the run's own code, at the site `balanced` (default: the
    first one). A new generator is ready after `start_s`.
    `picture_of`: the iteration whose spans are kept, also of samples that end in a later one.
    """

    spec: RunSpec
    learner: LearnerTimes
    sites: tuple[SimulatedSite, ...]
    workload: Workload | DrawnLengths  # or the lengths themselves, of all iterations
    cores: float | None = None
    colocated: bool = False
    switch_s: float = 0.0
    barrier: bool = False
    iterations: int | None = None  # instead of those of the run file
    seed: int = 0
    failures: tuple[Outage, ...] = ()
    balance: BalanceSection | None = None
    balanced: str = ""
    start_s: float = 0.0
    learner_price_per_hour: float = 0.0
    messages: MessageTimes = MessageTimes()
    picture_of: int | None = None

    def __post_init__(self) -> None:
        """Raise SimulationError if this can't be a run."""
        algorithm = self.spec.algorithm
        if algorithm.mode == "offline":
            raise SimulationError("algorithm.mode is offline: such a run generates nothing to simulate")
        if not any(site.engines for site in self.sites):
            raise SimulationError("no site has an engine: nothing would ever be generated")
        names = [site.name for site in self.sites]
        if len(set(names)) < len(names):
            raise SimulationError(f"two sites have one name: {sorted(names)}")
        for site in self.sites:
            _check_site(site)
        if self.balanced and self.balanced not in names:
            raise SimulationError(f"balanced is {self.balanced}; the sites are {', '.join(names)}")
        if not 0 <= self.start_s < math.inf:
            raise SimulationError(f"start_s must be at least 0; it is {self.start_s:g}")
        if self.cores is not None and self.cores <= 0:
            raise SimulationError(f"cores must be above 0, or None; it is {self.cores:g}")
        if self.barrier and (algorithm.mode != "async" or algorithm.order != "window"):
            raise SimulationError("barrier is for algorithm.mode async with order window")
        if self.iterations is not None and self.iterations < 1:
            raise SimulationError(f"iterations must be at least 1; it is {self.iterations}")
        _check_lengths(self.workload, algorithm, self.iterations or algorithm.iterations)
        learner = self.learner
        times = (learner.token_s, learner.microbatch_s, learner.step_s, learner.publish_s, learner.cores)
        if not all(0 <= one < math.inf for one in (*times, learner.version_bytes)):
            raise SimulationError("the learner's seconds, bytes and cores must be at least 0, and finite")
        count = sum(len(site.engines) for site in self.sites)
        for outage in self.failures:
            _check_outage(outage, count)


def _check_machines(site: SimulatedSite) -> None:
    if not 0 <= site.price_per_hour < math.inf:
        raise SimulationError(f"site {site.name}: its price must be at least 0 per hour")
    if site.link is not None and site.link.bytes_per_s <= 0:
        raise SimulationError(f"site {site.name}: its link carries no bytes; give bytes_per_s above 0")
    if site.machine_generators < 1:
        raise SimulationError(f"site {site.name}: machine_generators must be at least 1")
    if (one := site.preemption) is not None and not (
        0 <= one.per_hour < math.inf and 0 <= one.notice_s < math.inf and 0 < one.back_s < math.inf
    ):
        raise SimulationError(
            f"site {site.name}: per_hour and notice_s of its preemption must be at least 0, and "
            "back_s above 0"
        )


def _check_outage(outage: Outage, count: int) -> None:
    if not 0 <= outage.generator < count:
        raise SimulationError(f"generator {outage.generator} can't fail: there are {count}, counted from 0")
    if not (0 <= outage.at_s < math.inf and outage.back_after_s > 0 and outage.notice_s >= 0):
        raise SimulationError(
            f"generator {outage.generator} can't fail at {outage.at_s:g} s for {outage.back_after_s:g} s: "
            "at_s and notice_s must be at least 0, and back_after_s above 0"
        )


def _check_lengths(workload: Workload | DrawnLengths, algorithm: AlgorithmSection, iterations: int) -> None:
    if isinstance(workload, Workload):
        return
    wanted = iterations * algorithm.groups, algorithm.group_size
    if workload.answers.shape != wanted or not (
        len(workload.prompts) == len(workload.predicted) == wanted[0]
    ):
        raise SimulationError(
            f"the given lengths are of {workload.answers.shape[0]} groups of {workload.answers.shape[1]}; "
            f"{iterations} iterations have {wanted[0]} groups of {wanted[1]}"
        )


def _check_site(site: SimulatedSite) -> None:
    for engine in site.engines:
        _check_engine(site.name, engine)
    if site.cores is not None and site.cores <= 0:
        raise SimulationError(f"site {site.name}: it has {site.cores:g} cores: that must be above 0")
    _check_machines(site)


def _check_engine(site: str, engine: EngineTimes) -> None:
    if engine.slots < 1:
        raise SimulationError(f"site {site}: an engine needs at least one slot; its batch_s is too short")
    if not all(0 < seconds < math.inf for seconds in engine.batch_s):
        raise SimulationError(f"site {site}: each of an engine's batch_s must be above 0")
    others = (
        engine.context_s,
        engine.prefill_s,
        engine.fill_s,
        engine.install_s,
        engine.reward_s,
        engine.cores,
    )
    if min(others) < 0:
        raise SimulationError(f"site {site}: an engine's seconds and cores must be at least 0")

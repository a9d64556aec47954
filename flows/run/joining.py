"""Starts generators, relays and ranks that join a run, on this machine or at a site far from its store."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from flows.run.commands import (
    GENERATOR,
    RanksHere,
    Worker,
    at_site,
    engine_worker,
    far_ranks,
    launched_as,
    on_gpus,
    with_env,
    worker,
)
from flows.run.dealt_gpus import DealtGpus, own_gpus
from flows.run.far_files import model_here, reward_here, start_model_here
from flows.run.gpu_claims import GpuClaims
from flows.run.locations import Places, logs_folder, named_store, store_url
from flows.run.request import RunFailed
from flows.run.run_outlook import RunOutlook
from flows.run.supervision import RunProcesses
from infra.bus import near_ends, read_all
from infra.gate import Gate, passed_over
from infra.run_bus import connect
from infra.runs import RunRecord, find
from infra.sites.place import Site, site_of
from infra.stack.paths import StackPaths
from infra.stores.opening import open_store
from infra.supervise.team import Team
from infra.weights.garbage import ByteProgress
from schemas.messages import Heartbeat
from schemas.topics import Topics

_READ_S = 30.0
_PAUSED_S = 1.0  # between looks whether a paused run goes on
_NEWEST = 2000  # heartbeats that are read: enough for one of each process that is alive


@dataclass(frozen=True, slots=True)
class Joining:
    """Processes that join a run."""

    record: RunRecord
    workers: list[Worker]
    claims: GpuClaims  # of the GPUs that they use


def joining(
    run: str, *, store: str = "local", site: str | None = None, cache: str | None = None,
    relays: int | None = None, generators: int | None = None, model: str | None = None,
    reward: str | None = None, ranks: RanksHere | None = None,
    progress: ByteProgress = lambda done, whole: None,
) -> Joining:  # fmt: skip
    """Return the processes that shall join a run, not started yet, with GPUs claimed for them.

    `ranks`: of the trainer, or of an engine, that stands on another machine; then by default there are no
    generators here. `cache`, `relays`, `generators`: by default as the run file says of the site, else local,
    1 and 1. `model`, `reward`: where they are on this machine, if not where the run has them. `progress`:
    called while the model is fetched, if it is nowhere here.
    """
    url, ranks = store_url(store), ranks or RanksHere()
    record = find(named_store(store), run)
    places = Places(record.bootstrap_servers, url, {"STREAMRL_HOME": str(StackPaths.locate().home)})
    planned = record.spec.placement.sites.get(site or "")
    _check_ranks(record, ranks)
    if (ranks.trainer or ranks.engine) and generators is None:
        generators, relays = 0, 0
    if generators is None:
        generators = planned.generators or 1 if planned else 1
    if relays is None:
        relays = planned.relays if planned else 1
    first = random.randrange(1000, 1_000_000)  # the run's own processes are numbered from 0
    at = site_of(site, cache or (planned.cache if planned else "local"))
    if at is None:
        found = [worker(GENERATOR, first + n, record, places) for n in range(generators)]
    else:
        found = at_site(at, relays, generators, record, places, first=(first, first))
    if not found and not ranks.trainer and not ranks.engine:
        raise RunFailed("there is nothing to start: say --generators with a number above 0")
    shared, each = record.spec.placement.share_gpus, own_gpus(record.spec)
    wanted = DealtGpus((), ranks.trainer + ranks.engine, shared=shared, each=each)
    with ExitStack() as unless_all_is_well:
        claims = unless_all_is_well.enter_context(GpuClaims())
        gpus = claims.deal(wanted, generators, launched=launched_as(ranks.trainer))
        here = _here(record, at, model, reward, progress) if generators else []
        found = on_gpus([replace(one, argv=[*one.argv, *here]) for one in found], gpus.for_generator)
        found += _training(ranks.trainer, record, places, gpus, model, first)
        if ranks.engine:
            one = engine_worker(ranks, record, places, number=first)
            folder = model_here(record, model, open_store(record.store), open_store(record.store), progress)
            one = replace(one, argv=[*one.argv, *(["--model", folder] if folder else [])])
            found.append(with_env(one, gpus.for_engine_ranks(ranks.trainer)))
        unless_all_is_well.pop_all()
    return Joining(record, found, claims)


def joining_generator(record: RunRecord, store: str, claims: GpuClaims, place: int) -> Worker:
    """Return a generator that shall join a run, not started yet.

    `place`: its number among those that join with the same `claims`, by which it has its GPUs.
    """
    home = {"STREAMRL_HOME": str(StackPaths.locate().home)}
    places = Places(record.bootstrap_servers, store_url(store), home)
    wanted = DealtGpus((), shared=record.spec.placement.share_gpus, each=own_gpus(record.spec))
    gpus = claims.deal(wanted, place + 1)
    one = worker(GENERATOR, random.randrange(1000, 1_000_000), record, places)
    here = _here(record, None, None, None, lambda done, whole: None)
    return with_env(replace(one, argv=[*one.argv, *here]), gpus.for_generator(place))


def _check_ranks(record: RunRecord, ranks: RanksHere) -> None:
    """Raise RunFailed if the run has no ranks on other machines."""
    if ranks.trainer and not record.spec.placement.ranks.elsewhere:
        raise RunFailed(
            f"the trainer of run {record.id} has all its ranks on its own machine: set placement.ranks."
            "elsewhere"
        )
    if ranks.generator is not None and not ranks.engine:
        raise RunFailed("--of-generator is for ranks of an engine: say --engine-ranks, too")
    if ranks.engine and not record.spec.placement.engine_ranks.elsewhere:
        raise RunFailed(
            f"the engines of run {record.id} have all their ranks beside their generators: set "
            "placement.engine_ranks.elsewhere"
        )


def _training(
    count: int, record: RunRecord, places: Places, gpus: DealtGpus, model: str | None, first: int
) -> list[Worker]:
    """Return ranks of the trainer for this machine."""
    # a rank with a launcher takes the GPU of its number, of those that the launcher shows
    shown = {} if launched_as(count) else replace(gpus, ranks=count).for_ranks()
    folder = start_model_here(record, model) if count else None
    there = ["--model", folder] if folder else []
    found = [with_env(one, shown) for one in far_ranks(count, record, places, first=first)]
    return [replace(one, argv=[*one.argv, *there]) for one in found]


def _here(
    record: RunRecord, site: Site | None, model: str | None, reward: str | None, progress: ByteProgress
) -> list[str]:
    """Return the arguments that tell processes where model and reward are on this machine."""
    reward = reward_here(record, reward)
    origin = open_store(record.store)
    if site is None:
        model = model_here(record, model, origin, origin, progress)
    else:
        with site.opened(record, origin, deadline_s=record.spec.deadlines.progress_s) as near:
            model = model_here(record, model, near, origin, progress)
    return [*(["--model", model] if model else []), *(["--reward", reward] if reward else [])]


def take_part(
    joined: Joining, say: Callable[[str], None], *, tick: Callable[[], None] = lambda: None
) -> None:
    """Run the processes until the run has ended, but not while it is paused. None is left, however this ends.

    `tick` is called now and then. Raises RunFailed if the run has ended already.
    """
    record = joined.record
    bus, topic = connect(record, "streamrl-join"), Topics(record.id, record.spec.lengths.classes).status
    gate = Gate(Heartbeat, record.id, passed_over)
    said = read_all(bus, topic, near_ends(bus, topic, _NEWEST), deadline_s=_READ_S)
    outlook = RunOutlook(open_store(record.store), record)
    outlook.hear(gate.messages(said))
    if outlook.is_over():
        raise RunFailed(
            f"run {record.id} has ended or was stopped; `streamrl run RUNFILE --resume {record.id}` goes on "
            "with it"
        )
    status = bus.reader(topic, {0: said[-1].offset + 1} if said else None)
    with joined.claims:
        while not outlook.is_over():
            if outlook.is_paused():
                say(f"run {record.id} is paused: its processes start here again when it goes on")
                while outlook.is_paused():
                    outlook.hear(gate.messages(status.poll(_PAUSED_S)))
                    tick()
                continue
            with Team(join_logs(record), holds=joined.claims.descriptors) as team:
                crew = RunProcesses(team, joined.workers, restarts=record.spec.placement.restarts, say=say)
                crew.start()
                for name, process in team.running.items():
                    say(f"{name} is process {process}; log: {team.log(name)}")
                while not (crew.all_done or outlook.is_over() or outlook.is_paused()):
                    outlook.hear(gate.messages(status.poll(0.2)))
                    outlook.check_heard()
                    crew.poll(0.5)
                    crew.start_again()
                    crew.check()
                    tick()
            if crew.all_done:
                return


def join_logs(record: RunRecord) -> Path:
    """Return the folder for the logs of processes that join a run from this machine."""
    logs = logs_folder(record)
    return logs if logs.is_dir() else StackPaths.locate().logs / record.id  # its report folder is not here

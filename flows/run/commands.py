"""The commands and environments with which the processes of a run are started."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flows.run.dealt_gpus import DealtGpus
from flows.run.locations import Places
from infra.code import module
from infra.gpus import visible_gpus
from infra.ranks.launcher import WrongLaunch, local_rank, processes_here
from infra.runs import RunRecord
from infra.sites.place import Site
from infra.stack.doctor import tcmalloc
from schemas.runspec import RunSpec

FEEDER, TRAINER, GENERATOR, RELAY, RANK = "feeder", "trainer", "generator", "relay", "rank"
ENGINE_RANKS = "engine_ranks"  # of one engine, on another machine than its generator
MODULES = {
    FEEDER: "producers.feeder", TRAINER: "consumers.trainer", GENERATOR: "producers.generator",
    RELAY: "infra.relay", RANK: "consumers.ranks.far_rank",
    ENGINE_RANKS: "producers.engines.machine_ranks",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Worker:
    """The command of one process of a run, and its environment."""

    name: str
    role: str
    argv: list[str]
    env: dict[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class RanksHere:
    """Ranks that this machine holds for processes on others."""

    trainer: int = 0  # of the trainer
    engine: int = 0  # of a generator's engine
    generator: int | None = None  # the number of that generator; None: of any whose engine lacks ranks


def workers(record: RunRecord, places: Places, gpus: DealtGpus, generators: int) -> list[Worker]:
    """Return the processes that the run starts on this machine. The trainer is first: it starts slowest.

    `generators`: how many at no site.
    """
    trainer = with_env(worker(TRAINER, 0, record, places), gpus.for_ranks())
    if not record.spec.generates:
        return [trainer]
    found = [trainer, worker(FEEDER, 0, record, places)]
    placement = record.spec.placement
    first = placement.generators
    at_sites = sum(planned.generators for planned in placement.sites.values())
    numbers = own_numbers(generators, first, at_sites)
    found += on_gpus([worker(GENERATOR, one, record, places) for one in numbers], gpus.for_generator)
    there: list[Worker] = []
    relays, numbered = 0, first
    for name, planned in placement.sites.items():
        if planned.generators and not planned.elsewhere:
            there += at_site(Site(name, planned.cache), planned.relays, planned.generators, record, places,
                             first=(relays, numbered))  # fmt: skip
        relays, numbered = relays + planned.relays, numbered + planned.generators
    return found + on_gpus(there, gpus.for_site_generator)


def with_env(one: Worker, env: dict[str, str]) -> Worker:
    """Return a worker with more variables."""
    return replace(one, env=one.env | env)


def on_gpus(some: Sequence[Worker], shown: Callable[[int], dict[str, str]]) -> list[Worker]:
    """Return workers of which the generators have what `shown` says of the first, the second and so on."""
    places = itertools.count()
    return [with_env(one, shown(next(places))) if one.role == GENERATOR else one for one in some]


def own_numbers(count: int, first: int, at_sites: int) -> list[int]:
    """Return the numbers of so many generators at no site: those of sites follow the `first` ones."""
    return [number if number < first else number + at_sites for number in range(count)]


def at_site(
    site: Site, relays: int, generators: int, record: RunRecord, places: Places, *, first: tuple[int, int]
) -> list[Worker]:
    """Return a site's relays and generators. `first`: numbers of the first relay and the first generator."""
    shares = [replace(site, share=(number, relays)) for number in range(relays)]
    found = [worker(RELAY, first[0] + number, record, places, one) for number, one in enumerate(shares)]
    return found + [worker(GENERATOR, first[1] + n, record, places, site) for n in range(generators)]


def launched_as(count: int) -> str | None:
    """Return the number that a launcher, such as torchrun, gave to the one rank that is started here.

    None: it has no launcher, or there are several ranks.
    """
    number = local_rank() if count == 1 else None
    return None if number is None else str(number)


def ranks_here(trainer: int, engine: int, generator: int | None) -> RanksHere:
    """Return the ranks that somebody asks for. Raise WrongLaunch if a launcher would ask for them N times."""
    processes = processes_here() if trainer else 1
    if trainer > 1 and processes > 1:
        raise WrongLaunch(
            f"--ranks {trainer}: a launcher has started this command several times on this machine, and each "
            f"of them would start {trainer} ranks. Say --ranks 1, for one rank in each; or start it once, "
            "without the launcher"
        )
    return RanksHere(trainer, engine, generator)


def far_ranks(count: int, record: RunRecord, places: Places, *, first: int) -> list[Worker]:
    """Return ranks of the trainer on this machine, for a run whose trainer is on another."""
    found = [worker(RANK, first + number, record, places) for number in range(count)]
    launched = launched_as(count)
    if launched and len(visible_gpus()) == 1:  # launchers such as Slurm show each rank its own GPU alone
        launched = "0"
    return [with_env(one, {"LOCAL_RANK": launched or str(number)}) for number, one in enumerate(found)]


def engine_worker(here: RanksHere, record: RunRecord, places: Places, *, number: int) -> Worker:
    """Return the process that holds ranks of an engine on this machine, for a generator on another."""
    found = worker(ENGINE_RANKS, number, record, places)
    of = [] if here.generator is None else ["--generator", str(here.generator)]
    return replace(found, argv=[*found.argv, "--ranks", str(here.engine), *of])


def worker(role: str, number: int, record: RunRecord, places: Places, site: Site | None = None) -> Worker:
    """Return the command of one process, which can also be started by hand like this."""
    argv = [
        sys.executable, "-m", module(MODULES[role]), "--store", places.store_url, "--run", record.id,
        "--number", str(number), *(site.argv() if site else ()),
    ]  # fmt: skip
    name = f"{role}-{number}" if role in (GENERATOR, RELAY, RANK, ENGINE_RANKS) else role
    return Worker(name, role, argv, places.env | environment(role, record.spec))


def environment(role: str, spec: RunSpec) -> dict[str, str]:
    """Return the environment variables that a role needs."""
    env = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    downloads = role == FEEDER and spec.task.dataset and not Path(spec.task.dataset).exists()
    if not downloads:
        env["HF_HUB_OFFLINE"] = os.environ.get(
            "HF_HUB_OFFLINE", "1"
        )  # models are folders: nothing is fetched
    threads = {
        TRAINER: spec.trainer.threads,
        RANK: spec.trainer.threads,
        GENERATOR: spec.generator.threads,
        ENGINE_RANKS: spec.generator.threads,
    }.get(role, 1)
    env["OMP_NUM_THREADS"] = str(threads)
    return env | allocator() if role in (TRAINER, RANK, GENERATOR, ENGINE_RANKS) else env


def allocator() -> dict[str, str]:
    """Return variables that make a process keep freed memory: torch allocates large buffers all the time."""
    library = tcmalloc()
    if library is None:
        # glibc would otherwise give the buffers back to the system and pay for each page again.
        return {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
    return {"LD_PRELOAD": " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD", "")]))}

"""How the processes of a run are started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from flows.run.locations import Places
from infra.code import module
from infra.runs import RunRecord
from infra.sites.place import Site
from infra.stack.doctor import tcmalloc
from schemas.runspec import RunSpec

FEEDER, TRAINER, GENERATOR, RELAY = "feeder", "trainer", "generator", "relay"
MODULES = {
    FEEDER: "producers.feeder", TRAINER: "consumers.trainer", GENERATOR: "producers.generator",
    RELAY: "infra.relay",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of a run."""

    name: str
    role: str
    argv: list[str]
    env: dict[str, str] = field(repr=False)


def workers(record: RunRecord, places: Places) -> list[Worker]:
    """All that the run starts on this machine. The trainer first: it takes longest to be ready."""
    trainer = worker(TRAINER, 0, record, places)
    if record.spec.algorithm.mode == "offline" and not record.spec.evaluation.problems:
        return [trainer]
    found = [trainer, worker(FEEDER, 0, record, places)]
    placement = record.spec.placement
    found += [worker(GENERATOR, number, record, places) for number in range(placement.generators)]
    relays, generators = 0, placement.generators
    for name, planned in placement.sites.items():
        if not planned.elsewhere:
            found += at_site(Site(name, planned.cache), planned.relays, planned.generators, record, places,
                             first=(relays, generators))  # fmt: skip
        relays, generators = relays + planned.relays, generators + planned.generators
    return found


def at_site(
    site: Site, relays: int, generators: int, record: RunRecord, places: Places, *, first: tuple[int, int]
) -> list[Worker]:
    """The processes of a site, numbered from `first` on."""
    shares = [replace(site, share=(number, relays)) for number in range(relays)]
    found = [worker(RELAY, first[0] + number, record, places, one) for number, one in enumerate(shares)]
    return found + [worker(GENERATOR, first[1] + n, record, places, site) for n in range(generators)]


def worker(role: str, instance: int, record: RunRecord, places: Places, site: Site | None = None) -> Worker:
    """One process; anyone can start it like this by hand."""
    argv = [
        sys.executable, "-m", module(MODULES[role]), "--store", places.store_url, "--run", record.id,
        "--instance", str(instance), *(site.argv() if site else ()),
    ]  # fmt: skip
    name = f"{role}-{instance}" if role in (GENERATOR, RELAY) else role
    return Worker(name, role, argv, places.env | environment(role, record.spec))


def environment(role: str, spec: RunSpec) -> dict[str, str]:
    """What a role needs in its environment."""
    env = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    downloads = role == FEEDER and spec.task.dataset and not Path(spec.task.dataset).exists()
    if not downloads:
        env["HF_HUB_OFFLINE"] = os.environ.get(
            "HF_HUB_OFFLINE", "1"
        )  # models are folders: nothing is fetched
    threads = {TRAINER: spec.trainer.threads, GENERATOR: spec.generator.threads}.get(role, 1)
    env["OMP_NUM_THREADS"] = str(threads)
    return env | allocator() if role in (TRAINER, GENERATOR) else env


def allocator() -> dict[str, str]:
    """What keeps memory with a process: torch allocates and frees large buffers all the time."""
    library = tcmalloc()
    if library is None:
        # The same of glibc, which else gives them back to the system and pays for each page again.
        return {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
    return {"LD_PRELOAD": " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD", "")]))}

"""Runs of the demo's task by `streamrl run`, with random kills of their processes on the way."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil

from infra.kafka_bus import KafkaBus
from infra.runs import RunRecord, newest_run
from infra.stack import local
from infra.stores.opening import open_store
from infra.stores.store import Store
from schemas.topics import Topics
from tests.bench import _chaos_events as events
from tests.bench._runs import RUNFILE, bus_of, finish, start

_ROLES = ("trainer", "feeder", "generator", "engine")
_BEGINS_S = 900.0  # a fresh checkout has to build its model first
_MODES = {
    "sync": ("algorithm.mode=sync", "algorithm.staleness=0"),
    "async": ("algorithm.mode=async", "algorithm.staleness=2"),
}


def killed_run(
    stack: local.Stack, folder: Path, mode: str, *, steps: int, kills: int, seed: int
) -> tuple[RunRecord, list[str]]:
    """Return a run that came to its end although processes were killed, and the roles of those."""
    draw = random.Random(seed)
    at = sorted(draw.sample(range(2, steps - 2), kills))
    changes = [
        *_MODES[mode], f"algorithm.iterations={steps}", "algorithm.groups=32", f"seed={seed}",
        "placement.generators=2", "evaluation.problems=0", f"report={folder}/runs",
        "trainer.checkpoint_every=8", f"placement.restarts={kills}",
    ]  # fmt: skip
    store = open_store(f"file://{stack.paths.home}/store")
    before = newest_run(store)
    flow, bus = start(str(RUNFILE), changes, stack), bus_of(stack)
    try:
        killed = _kill(flow, bus, _begun(flow, store, before), at, draw)
    finally:
        bus.close()
    return finish(flow, stack), killed


def _begun(flow: psutil.Popen, store: Store, before: RunRecord | None) -> RunRecord:
    """The run's record, as soon as it is there."""
    until = time.monotonic() + _BEGINS_S
    while flow.poll() is None and time.monotonic() < until:
        found = newest_run(store)
        if found is not None and (before is None or found.id != before.id):
            return found
        time.sleep(0.1)
    flow.terminate()
    raise RuntimeError(f"the run has not begun:\n{flow.communicate()[0].decode()[-3000:]}")


def _kill(
    flow: psutil.Popen, bus: KafkaBus, record: RunRecord, at: list[int], draw: random.Random
) -> list[str]:
    """Kill a process of a drawn role when the ledger has these many steps."""
    killed: list[str] = []
    roles = [role for _ in range(0, len(at), len(_ROLES)) for role in draw.sample(_ROLES, len(_ROLES))]
    ledger = bus.reader(Topics(record.id, record.spec.lengths.classes).ledger)
    try:
        while len(killed) < len(at) and flow.poll() is None:
            if ledger.end_offsets()[0] < at[len(killed)]:
                time.sleep(0.05)
                continue
            # One that has just been killed, and is not there again, is waited for.
            if events.kill(record.id, roles[len(killed)]):
                killed.append(roles[len(killed)])
    finally:
        ledger.close()
    return killed

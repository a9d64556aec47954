"""An engine of two ranks: both on one machine, and one of them on another, over loopback and over a link.

    step_ms    of a decode step of eight samples: the median of rounds, the engines in turn
    over_local by how much longer that is than with both ranks on one machine, which share memory
    patch_mb   the generator's patch for 2 % of the weights
    got_mb     what then comes to the other machine, headers and all: one patch, and what is said besides

The link is one between two network namespaces; a process passes each packet on, so its latency is that of a
slow network: see `ping_ms`.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from infra.runs import create
from infra.stores.opening import open_store
from infra.supervise.children import kill, start_child
from infra.weights.bits import Bits
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from producers.engines.engine import FarRanksAsked, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from tests.bench._link import Link, two_sites
from tests.bench._sized import make_model
from tests.factories import make_spec
from tests.harness import ROOT
from tests.waiting import wait_until

_SLOTS, _TOKENS, _DEADLINE_S = 8, 160, 300
_CHANGED = 0.02
_RATE = 10e9 / 8  # bytes a second of the link, which its process does not reach
_COLUMNS = ("step_ms", "over_local", "ping_ms", "patch_mb", "got_mb")


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench far_engine")
    parser.add_argument("--rounds", type=int, default=3 if quick else 9)
    parser.add_argument("--size", default="30M", help="of the model: 30M or 100M weights")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name, two_sites(rate=_RATE, delay_s=0.0) as link:
        folder = Path(name)
        model = make_model(folder / "model", given.size, "float32")
        with ExitStack() as stack:
            engines = {
                "one machine": stack.enter_context(_engine(folder, model, None, link)),
                "over loopback": stack.enter_context(_engine(folder, model, "127.0.0.1", link)),
                "over the link": stack.enter_context(_engine(folder, model, link.near_address, link)),
            }
            times: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(given.rounds + 1):
                for name, engine in engines.items():
                    seconds = _step_s(engine, number)
                    if number:  # the first one warms up
                        times[name].append(seconds)
            patch_mb, got_mb = _bytes_of_patch(engines["over the link"], model, link)
        ping_ms = _ping_ms(link)
    local = statistics.median(times["one machine"])
    rows = [
        {"ranks": name, "step_ms": 1000 * statistics.median(some),
         "over_local": statistics.median(some) / local}
        for name, some in times.items()
    ]  # fmt: skip
    rows[-1] |= {"ping_ms": ping_ms, "patch_mb": patch_mb, "got_mb": got_mb}
    Console(stderr=True).print(_table(rows))
    return {"model": given.size, "rounds": given.rounds, "rows": rows}


@contextmanager
def _engine(folder: Path, model: Path, address: str | None, link: Link) -> Iterator[RemoteEngine]:
    """An engine, with weights. `address`: at which a far rank finds it; None: there is none."""
    placed = {"elsewhere": 1, "address": address} if address else {}
    spec = make_spec(
        generator={"slots": _SLOTS, "kv_cache_mib": 64, "tensor_parallel": 2},
        sampling={"max_tokens": _TOKENS, "max_prompt_tokens": 16}, trainer={"microbatch_tokens": 256},
        placement={"engine_ranks": placed},
    )  # fmt: skip
    run, store = f"far-bench-{(address or 'none').replace('.', '-')}-1", f"file://{folder}/store"
    create(open_store(store), spec, bootstrap_servers="none", model=str(model), run_id=run)
    far = FarRanksAsked(store, run, 0) if address else None
    options = EngineOptions(model=str(model), spec=spec.model_dump_json(), far=far)
    engine = RemoteEngine(options, threading.Event(), deadline_s=_DEADLINE_S).open()
    machine = None
    if address:
        words = [sys.executable, "-m", "tests.bench._far_machine", str(folder), run]
        machine = start_child(link.at_far(words) if address == link.near_address else words, cwd=ROOT)
    try:
        engine.wait_until_ready()
        weights = dict(ModelFolder(model).bits())
        _give(engine, PatchFile({}, weights, since=None, root="0"))
        yield engine
    finally:
        engine.close()
        if machine is not None:
            kill(machine)


def _give(engine: RemoteEngine, patch: PatchFile) -> None:
    engine.prepare(patch)
    wait_until(engine.is_ready, what="its being ready", deadline_s=_DEADLINE_S)
    engine.install(recompute=False)
    wait_until(engine.digests, what="what it holds", deadline_s=_DEADLINE_S)


def _step_s(engine: RemoteEngine, number: int) -> float:
    """Seconds of a decode step of a full batch."""
    for place in range(_SLOTS):
        name = f"{number:07d}-{place:02d}"
        engine.submit(SampleRequest(name, [4, 5, 6], _TOKENS, place, 1.0, endless=True))
    began, left = time.perf_counter(), _SLOTS
    while left:
        left -= len(engine.step(1.0))
    return (time.perf_counter() - began) / _TOKENS


def _bytes_of_patch(engine: RemoteEngine, model: Path, link: Link) -> tuple[float, float]:
    """The size of a patch for 2 % of the weights, and what comes to the other machine with it, in MB."""
    old, draw = dict(ModelFolder(model).bits()), np.random.default_rng(1)

    def moved(bits: Bits) -> Bits:
        """Weights of which so many have another last bit."""
        pick = draw.random(bits.data.size, np.float32) < _CHANGED
        return Bits(bits.dtype, bits.shape, bits.data ^ pick.astype(bits.data.dtype))

    patch = PatchFile(old, {name: moved(bits) for name, bits in old.items()}, since="0", root="1")
    before = link.crossed()
    _give(engine, patch)
    return patch.path.stat().st_size / 1e6, (link.crossed() - before) / 1e6


def _ping_ms(link: Link) -> float:
    """The median time of a packet there and back, by TCP: a byte each way."""
    server = (
        "import socket\n"
        "with socket.create_server(('10.77.0.2', 7001)) as listening:\n"
        "    one = listening.accept()[0]\n"
        "    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)\n"
        "    while byte := one.recv(1): one.sendall(byte)\n"
    )
    process = subprocess.Popen(link.at_far([sys.executable, "-c", server]))
    try:
        return _pinged("10.77.0.2", 7001)
    finally:
        process.kill()
        process.wait()


def _pinged(host: str, port: int) -> float:
    found: list[socket.socket] = []

    def connected() -> bool:
        try:
            found.append(socket.create_connection((host, port), timeout=5))
        except OSError:
            return False
        return True

    wait_until(connected, what="the other side")
    taken = []
    with found[0] as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(200):
            began = time.perf_counter()
            one.sendall(b".")
            one.recv(1)
            taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="an engine of two ranks")
    for column in ("ranks", *_COLUMNS):
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(row["ranks"], *(f"{row[one]:.2f}" if one in row else "" for one in _COLUMNS))
    return table

"""Whatever may happen to a run: kills, stops, twins, poison, a full disk, a store that vanishes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from kafka import KafkaProducer

MODULES = {"trainer": "consumers.trainer", "feeder": "producers.feeder", "generator": "producers.generator",
           "engine": "producers.engines.engine_process", "reward": "producers.reward_worker",
           "guard": "infra.supervise.guard"}  # fmt: skip
_TOPICS = ("prompts", "samples", "assignments", "parts", "instances", "weights", "evals", "dead",
           "status", "ranker")  # fmt: skip


def processes(run: str, role: str) -> list[psutil.Process]:
    """Those of a role that work on a run, whoever started them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if MODULES[role] in line and (run in line or _descends_from(process, run)):
                found.append(process)
    return found


def _descends_from(process: psutil.Process, run: str) -> bool:
    """Engines and reward processes don't name their run; the generator above them does."""
    return any(run in parent.cmdline() for parent in process.parents())


def kill(run: str, role: str) -> bool:
    """kill -9, one process alone; whether there was one."""
    for process in processes(run, role)[:1]:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
            return True
    return False


@contextlib.contextmanager
def standing_still(run: str, role: str) -> Iterator[None]:
    """A process is stopped, and goes on."""
    stopped = processes(run, role)[:1]
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


def poison(servers: str, run: str, draw: random.Random, *, step: int | None = None) -> str:
    """One record that nobody of the run has written, on any topic; its name. `step`: in the place of that
    step on the ledger, where the run must stop at it.
    """
    name, value = draw.choice(list(_payloads(run, draw)))
    if step is None:
        topic = draw.choice(_TOPICS)
        key = draw.choice([b"0000000-00", b"newest", b"\xff\xfe", b"trainer-0", b"site/x/0", b"3"])
    else:
        topic, key = "ledger", str(step).encode()
    producer = KafkaProducer(bootstrap_servers=servers.split(","), max_request_size=8 << 20)
    try:
        producer.send(f"{run}.{topic}", value=value, key=key, partition=0)
        producer.flush(30)
    finally:
        producer.close()
    return f"{name} on {topic}"


def _payloads(run: str, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    yield "rubbish", draw.randbytes(200)
    yield "nothing", b""
    yield "8 MB of rubbish", draw.randbytes((8 << 20) - 4096)
    yield "200,000 levels", _record(b"\x84\xa4kind\xa6sample\xa7version\x01\xa6fields" + b"\x91" * 200_000)
    for kind, arrays in _FALSE.items():
        yield f"false {kind}", false_message(kind, run, draw, arrays)


_FALSE: dict[str, dict[str, int]] = {
    "report": {"groups": 3, "indexes": 1, "tokens": 2},
    "weights": {},
    "sample": {"tokens": 4, "logprobs": 3},
    "step": {"groups": 2, "offsets": 1},
    "heartbeat": {},
    "dead": {},
}


def false_message(kind: str, run: str, draw: random.Random, arrays: dict[str, int]) -> bytes:
    """A record of this run that claims what can't be."""
    fields: dict[str, Any] = {
        "run": draw.choice([run, "another-1"]), "version": draw.choice([-9, 2**31 - 1, 2**63]),
        "root": "0" * 32,
        "manifest": "nowhere", "size": 2**40, "trainer_epoch": 2**30, "announced_at": 0.0, "instance": "x",
        "start": "y", "slots": 2**40, "batches": [1, 2], "seconds": [float("nan")], "returned": ["xyz"],
        "leaving": False, "sent_at": 0.0, "topic": f"{run}.samples", "partition": 0, "offset": 0,
        "reason": "none",
        "raw": b"", "found_by": "nobody", "found_at": 0.0, "wanted": "xyz", "role": "feeder", "pid": 1,
        "host": "h", "state": "ended", "waits_for": "", "unblocked_by": "", "since": 0.0, "counters": {},
        "length_class": -9, "purpose": "train", "iteration": 2**40, "group": 0, "index": 0,
    }  # fmt: skip
    header = {"kind": kind, "version": 1, "fields": fields, "arrays": []}
    body = b""
    for name, count in arrays.items():
        raw = np.arange(count, dtype=np.int32).tobytes()
        header["arrays"].append([name, "int32", count, len(body)])  # type: ignore[attr-defined]
        body += raw + b"\0" * (-len(raw) % 8)
    return _record(msgspec.msgpack.encode(header), body)


def _record(header: bytes, body: bytes = b"") -> bytes:
    gap = -(16 + len(header)) % 8
    return struct.pack("<4sHHII", b"SRL\0", 1, 0, len(header), len(body)) + header + b"\0" * gap + body


@contextlib.contextmanager
def vanished(store: Path) -> Iterator[Path]:
    """The store is away, as after an unmount: an empty folder stands in its place, and is yielded."""
    aside = store.with_name(f"{store.name}.aside")
    store.rename(aside)
    store.mkdir()
    try:
        yield store
    finally:
        # a process may write into the empty one at this moment
        if not eventually(lambda: _put_back(aside, store), 10):
            raise RuntimeError(f"{aside} could not be put back")


def _put_back(aside: Path, store: Path) -> bool:
    with contextlib.suppress(OSError):
        shutil.rmtree(store)
        aside.rename(store)
        return True
    return False


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """A disk has no room left."""
    filler = disk / "filler"
    try:
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(b"\0" * (1 << 16))
                file.flush()
        yield
    finally:
        filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path | None]:
    """A disk of that size, if this machine lets us mount one."""
    folder.mkdir(parents=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    try:
        yield folder if made.returncode == 0 else None
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def eventually(condition: Callable[[], bool], deadline_s: float) -> bool:
    """Whether a condition comes true in time."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


def kill_process(pid: int) -> None:
    """kill -9 by number."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

"""A hundred generators on one broker: samples a second, how long each is on its way, and what all this costs.

    feeder with its dispatcher ──► Kafka ──► 100 generators on `ReplayEngine`s ──► Kafka ──► a trainer that
                                                                                    reads, and learns nothing

All in real time on this machine: broker, feeder, generators and the reading side are the real ones. Each
generator has the latency curve of a 7B model on one H800 (StreamRL, figure 6) and samples of the paper's
length histogram, up to 1,000 tokens. More slots make more samples a second: `offered` is what the fleet would
make if no slot were ever empty.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from infra import runs
from infra.bus import ends_of, read_all
from infra.kafka_bus import KafkaBus
from infra.runs import RunRecord
from infra.stack import local
from infra.stack.paths import StackPaths
from infra.stores.opening import open_store
from infra.stores.store import Store
from infra.supervise.children import kill, start_child
from schemas.messages import GeneratorReport, StepRecord
from schemas.topics import Topics
from schemas.wire import decode
from tests.bench._fleet_generators import mean_length
from tests.bench._fleet_trainer import COLUMNS, RECEIVED
from tests.bench._lengths import CURVE
from tests.factories import make_spec, make_tiny_model
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
IN_ONE_PROCESS = 25
GROUPS, SIZE, AHEAD = 256, 8, 2.0  # an iteration; so many more are admitted ahead, so work always waits
TASK = """
def problems(split):
    return [{"id": str(n), "prompt": f"{n:04d}:"} for n in range(1024)]

def reward(problem, completion):
    return {}
"""


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench fleet")
    parser.add_argument("--generators", type=int, default=100)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 16] if quick else [4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=15.0 if quick else 60.0)
    parser.add_argument("--longest", type=int, default=1_000, help="tokens of the longest sample")
    parser.add_argument("--policy", default="deadline")
    given = parser.parse_args(argv)
    os.environ.setdefault("STREAMRL_CACHE", str(ROOT / ".streamrl"))
    for service in ("KAFKA", "S3", "PREFECT"):
        os.environ[f"STREAMRL_{service}_PORT"] = "0"
    console = Console(stderr=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        model = make_tiny_model(Path(folder) / "model")
        for slots in given.slots:
            console.print(f"{given.generators} generators of {slots} slots …")
            paths = StackPaths.locate(Path(folder) / f"stack-{slots}")
            stack = local.start_stack(prefect=False, paths=paths)
            try:
                rows.append(_one(Path(folder) / str(slots), stack, model, slots, given))
            finally:
                local.stop_stack(paths=paths)
    return _report(rows)


def _one(
    folder: Path, stack: local.Stack, model: Path, slots: int, given: argparse.Namespace
) -> dict[str, Any]:
    """One fleet at one load."""
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    spec = make_spec(
        run="fleet",
        task={"python": str(folder / "task.py")},
        sampling={"max_tokens": given.longest, "max_prompt_tokens": 8},
        algorithm={
            "mode": "async", "staleness": AHEAD, "iterations": 100_000, "groups": GROUPS, "group_size": SIZE,
        },
        lengths={"classes": 3},
        trainer={"microbatch_tokens": given.longest + 8},
        generator={"slots": slots},
        dispatch={"policy": given.policy},
    )  # fmt: skip
    assert stack.bootstrap_servers is not None
    store = open_store(f"file://{folder}/store")
    record = runs.create(store, spec, bootstrap_servers=stack.bootstrap_servers, model=str(model))
    bus, topics = KafkaBus(stack.bootstrap_servers), Topics(record.id, spec.lengths.classes)
    bus.create_topics(topics.all())
    (broker,) = [state.pid for state in local.stack_state(paths=stack.paths) if state.name == "kafka"]
    assert broker is not None
    with _processes(folder, record, given.generators) as processes:
        roles = {"broker": [psutil.Process(broker)], **processes}
        wait_until(
            lambda: _alive(processes, folder) and _there(bus, topics) >= given.generators,
            what="the generators' reports", deadline_s=240,
        )  # fmt: skip
        _wait_for_steps(bus, topics, 2, lambda: _alive(processes, folder))
        begin, before = time.time(), _cpu(roles)
        time.sleep(given.seconds)
        end, after = time.time(), _cpu(roles)
        _alive(processes, folder)
        _stop(processes["trainer"])
    cpu = {role: (after[role] - before[role]) / (end - begin) for role in before}
    cpu["others"] = cpu.pop("all") - sum(cpu.values())
    seconds = float(CURVE.table(slots)[slots]) * mean_length(given.longest)  # of a sample, in a full batch
    return _measured(store, bus, topics, begin, end, cpu) | {
        "generators": given.generators, "slots": slots, "longest": given.longest,
        "offered_per_s": given.generators * slots / seconds,
    }  # fmt: skip


@contextmanager
def _processes(folder: Path, record: RunRecord, generators: int) -> Iterator[dict[str, list[psutil.Process]]]:
    run = ["--store", record.store, "--run", record.id]
    commands = {"feeder": [["producers.feeder", *run]], "trainer": [["tests.bench._fleet_trainer", *run]]}
    commands["generators"] = [
        ["tests.bench._fleet_generators", *run, "--first", str(first),
         "--count", str(min(IN_ONE_PROCESS, generators - first))]
        for first in range(0, generators, IN_ONE_PROCESS)
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    started: list[subprocess.Popen[bytes]] = []
    found: dict[str, list[psutil.Process]] = {}
    try:
        for role, lines in commands.items():
            for number, line in enumerate(lines):
                with (folder / f"{role}-{number}.log").open("wb") as log:
                    process = start_child(
                        [sys.executable, "-m", *line], stdout=log, stderr=log, cwd=ROOT, env=environment
                    )
                started.append(process)
                found.setdefault(role, []).append(psutil.Process(process.pid))
        yield found
    finally:
        for process in started:
            kill(process)


def _alive(processes: dict[str, list[psutil.Process]], folder: Path) -> bool:
    for role, members in processes.items():
        for number, process in enumerate(members):
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                log = (folder / f"{role}-{number}.log").read_text()
                raise RuntimeError(f"{role} {number} has ended:\n{log[-3000:]}")
    return True


def _there(bus: KafkaBus, topics: Topics) -> int:
    reports = read_all(bus, topics.generators, deadline_s=60)
    return len({decode(record.value, GeneratorReport).generator for record in reports})


def _wait_for_steps(bus: KafkaBus, topics: Topics, count: int, alive: Any) -> None:
    wait_until(
        lambda: alive() and ends_of(bus, topics.ledger)[0] >= count, what=f"{count} steps", deadline_s=240
    )


def _cpu(roles: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """CPU seconds by role, and of the whole machine."""
    times = {role: [process.cpu_times() for process in members] for role, members in roles.items()}
    whole = psutil.cpu_times()
    busy = sum(whole[:-2]) - whole.idle - whole.iowait  # guests count as users already
    return {role: sum(t.user + t.system for t in found) for role, found in times.items()} | {"all": busy}


def _stop(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _measured(
    store: Store, bus: KafkaBus, topics: Topics, begin: float, end: float, cpu: dict[str, float]
) -> dict[str, Any]:
    """What came in between."""
    came = np.frombuffer(store.get(RECEIVED)).reshape(-1, len(COLUMNS))
    received, finished, scored, _, tokens = came[(came[:, 0] >= begin) & (came[:, 0] < end)].T
    if any(ends_of(bus, topics.dead).values()):
        raise RuntimeError(f"{topics.dead.name} is not empty: what is measured is not a run that works")
    reports = [decode(r.value, GeneratorReport) for r in read_all(bus, topics.generators, deadline_s=60)]
    counted = [report for report in reports if begin <= report.sent_at < end]
    whole = [report for report in counted if report.whole]
    busy = [min(1.0, int((report.tokens >= 0).sum()) / report.slots) for report in whole]
    steps = [decode(r.value, StepRecord) for r in read_all(bus, topics.ledger, deadline_s=60)]
    late = (received - finished) * 1000
    return {
        "samples_per_s": len(received) / (end - begin),
        "tokens_per_sample": float(tokens.mean()),
        "mb_per_s": float(tokens.sum()) * 8 / 1e6 / (end - begin),
        "iterations": sum(begin <= step.finished_at < end for step in steps),
        "latency_p50_ms": float(np.percentile(late, 50)),
        "latency_p99_ms": float(np.percentile(late, 99)),
        "held_p50_ms": float(np.percentile((scored - finished) * 1000, 50)),
        "slots_idle": 1 - float(np.mean(busy)),
        "reports_per_s": len(counted) / (end - begin),
        **{f"cpu_{role}": value for role, value in cpu.items()},
    }


def _report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    table = Table(title=f"{rows[0]['generators']} generators in real time on one broker; CPU in cores")
    columns = {
        "slots": "slots", "offered_per_s": "offered/s", "samples_per_s": "samples/s", "mb_per_s": "MB/s",
        "latency_p50_ms": "finish to trainer, p50 ms", "latency_p99_ms": "p99 ms", "slots_idle": "slots idle",
        "cpu_broker": "CPU broker", "cpu_feeder": "feeder", "cpu_generators": "generators",
        "cpu_trainer": "trainer", "cpu_others": "not ours",
    }  # fmt: skip
    for name in columns.values():
        table.add_column(name, justify="right")
    for row in rows:
        cells = (row[column] for column in columns)
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=150).print(table)
    return {"rows": [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows]}

"""Whole runs for benches: a stack of their own in a temporary folder, and what a run left on its log."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from infra.bus import read_all
from infra.kafka_bus import KafkaBus
from infra.runs import RunRecord, newest_run
from infra.stack import local
from infra.stack.paths import StackPaths
from infra.stores.opening import open_store
from schemas.messages import Sample
from schemas.topics import Topics
from schemas.wire import decode

ROOT = Path(__file__).parents[2]
RUNFILE = ROOT / "examples" / "count.yaml"


@contextmanager
def own_stack(*, s3: bool = False) -> Iterator[local.Stack]:
    """Broker and Prefect server, and S3 if wanted, for this bench alone; models are those of the checkout."""
    os.environ.setdefault("STREAMRL_CACHE", str(ROOT / ".streamrl"))
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        paths = StackPaths.locate(Path(folder))
        before = os.environ.get("STREAMRL_HOME")
        os.environ["STREAMRL_HOME"] = folder
        models = ROOT / ".streamrl" / "models"
        models.mkdir(parents=True, exist_ok=True)
        (paths.home / "models").symlink_to(models)  # the warm-started model is built once
        stack = local.start_stack(s3=s3, paths=paths)
        try:
            yield stack
        finally:
            local.stop_stack(paths=paths)
            os.environ.pop("STREAMRL_HOME", None)
            if before is not None:
                os.environ["STREAMRL_HOME"] = before


def start(runfile: str, overrides: Sequence[str], stack: local.Stack) -> psutil.Popen:
    """`streamrl run` as a process."""
    settings = [part for override in overrides for part in ("--set", override)]
    return psutil.Popen(
        [sys.executable, "-m", "flows.cli", "run", runfile, *settings],
        env={**os.environ, **stack.env()}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(flow: psutil.Popen, stack: local.Stack, store: str | None = None) -> RunRecord:
    """Wait for a run's end; its record, in this store or the local one."""
    output, _ = flow.communicate()
    if flow.returncode:
        raise RuntimeError(f"the run failed:\n{output.decode()[-3000:]}")
    record = newest_run(open_store(store or f"file://{stack.paths.home}/store"))
    assert record is not None
    return record


def bus_of(stack: local.Stack) -> KafkaBus:
    """The stack's broker."""
    assert stack.bootstrap_servers is not None
    return KafkaBus(stack.bootstrap_servers)


def samples_of(bus: KafkaBus, topics: Topics) -> dict[tuple[int, int], Sample]:
    """All samples of a run, each once."""
    found: dict[tuple[int, int], Sample] = {}
    for record in read_all(bus, topics.samples, deadline_s=60):
        sample = decode(record.value, Sample)
        found.setdefault((sample.group, sample.index), sample)
    return found

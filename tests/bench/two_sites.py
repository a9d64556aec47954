"""The demo task with its generators at another site, over a link of 100 Mbit/s and 50 ms each way.

Broker, S3 server, feeder and trainer are at one site, relay and generators at the other. Beside it the same
run with all at one site: what was learned, and how fast.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.runs import RunRecord, runs_of
from infra.stack import local
from infra.store import open_store
from tests.bench._link import Link, two_sites
from tests.bench._runs import ROOT, finish, own_stack, start

_RUNFILE = str(ROOT / "examples" / "two_sites.yaml")
_START_S = 300.0


def main(*, quick: bool = False, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Both runs, one after the other, each with a stack of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench two_sites", description=__doc__)
    parser.add_argument("--iterations", type=int, default=12 if quick else 40)
    parser.add_argument("--set", action="append", default=[], help="another setting of the run file, a.b=c")
    given = parser.parse_args(argv)
    settings = [f"algorithm.iterations={given.iterations}", *given.set]
    found = {}
    with two_sites() as link:
        os.environ["STREAMRL_LISTEN"] = link.near_address
        for name, far in (("one site", None), ("two sites", link)):
            with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder, own_stack(s3=True) as stack:
                found[name] = _run(stack, Path(folder), settings, far)
                print(f"{name}: {found[name]}", flush=True)
    one, two = found["one site"], found["two sites"]
    return {
        "throughput_two_over_one": round(two["samples_per_s"] / one["samples_per_s"], 3),
        "reward_two_minus_one": round(two["reward"] - one["reward"], 3), **found,
    }  # fmt: skip


def _run(stack: local.Stack, folder: Path, settings: Sequence[str], far: Link | None) -> dict[str, Any]:
    assert stack.s3 is not None
    store = f"{stack.s3.url}/{folder.name}"
    os.environ |= stack.s3.env()
    where = ["placement.sites={}", "placement.generators=1"]
    if far is not None:
        where = ["placement.sites.far.elsewhere=true"]
    overrides = [*settings, *where, f"placement.store={store}", f"report={folder}/runs"]
    flow = start(_RUNFILE, overrides, stack)
    if far is None:
        return _result(finish(flow, stack, store), folder)
    begun = far.crossed()
    site = _join(far, folder, store)
    try:
        row = _result(finish(flow, stack, store), folder)
    finally:
        site.send_signal(signal.SIGINT)
        site.wait()
    return row | {"mb_to_far": round((far.crossed() - begun) / 1e6, 1)}


def _join(far: Link, folder: Path, store: str) -> subprocess.Popen[bytes]:
    """What somebody types at the far site, as soon as there is a run."""
    until = time.monotonic() + _START_S
    while not (runs := runs_of(open_store(store))):
        if time.monotonic() > until:
            raise RuntimeError(f"no run within {_START_S:.0f} s")
        time.sleep(0.5)
    words = [sys.executable, "-m", "flows.cli", "join", runs[0], "--store", store, "--site", "far"]
    environment = {**os.environ, "STREAMRL_HOME": str(folder / "far")}
    with (folder / "far.log").open("wb") as log:
        return subprocess.Popen(
            far.at_far(words), cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def _result(record: RunRecord, folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "runs" / record.id / "summary.json").read_text())
    everything = summary["result"][0]
    return {
        "before": round(everything["before"], 3), "reward": round(everything["after"], 3),
        "samples_per_s": round(summary["samples_per_s"], 1),
        "trainer_idle": round(summary["trainer_idle"], 3), "seconds": round(summary["training_s"], 1),
    }  # fmt: skip

"""The demo task with its generators at another site, over a link of 100 Mbit/s and 50 ms each way.

Broker, S3 server, feeder and trainer are at one site, relay and generators at the other: joined by hand, and
by Prefect deployments with a work pool for each site. Beside them the same run with all at one site: what was
learned, and how fast. All of it shares the cores of one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from infra.runs import RunRecord, runs_of
from infra.stack import local
from infra.stores.opening import open_store
from tests.bench._link import Link, two_sites
from tests.bench._runs import ROOT, finish, own_stack, start

_RUNFILE = str(ROOT / "examples" / "two_sites.yaml")
_ELSEWHERE = "placement.sites.far.elsewhere=true"
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
        for name, run in {"one site": _one, "two sites": _two, "two sites, deployed": _deployed}.items():
            with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder, own_stack(s3=True) as stack:
                begun = link.crossed()
                found[name] = run(_Bench(stack, Path(folder), settings, link))
                found[name]["mb_to_far"] = round((link.crossed() - begun) / 1e6, 1)
                print(f"{name}: {found[name]}", flush=True)
    one, two = found["one site"], found["two sites"]
    return {
        "throughput_two_over_one": round(two["samples_per_s"] / one["samples_per_s"], 3),
        "reward_two_minus_one": round(two["reward"] - one["reward"], 3), **found,
    }  # fmt: skip


@dataclass(frozen=True)
class _Bench:
    stack: local.Stack
    folder: Path
    settings: Sequence[str]
    link: Link

    def __post_init__(self) -> None:
        assert self.stack.s3 is not None
        os.environ |= self.stack.s3.env()

    @property
    def store(self) -> str:
        assert self.stack.s3 is not None
        return f"{self.stack.s3.url}/{self.folder.name}"

    def overrides(self, *where: str) -> list[str]:
        return [*self.settings, *where, f"placement.store={self.store}", f"report={self.folder}/runs"]

    @property
    def far_env(self) -> dict[str, str]:
        return {**os.environ, **self.stack.env(), "STREAMRL_HOME": str(self.folder / "far")}

    def result(self, flow: psutil.Popen) -> dict[str, Any]:
        return _result(finish(flow, self.stack, self.store), self.folder)


def _one(bench: _Bench) -> dict[str, Any]:
    where = bench.overrides("placement.sites={}", "placement.generators=1")
    return bench.result(start(_RUNFILE, where, bench.stack))


def _two(bench: _Bench) -> dict[str, Any]:
    """Somebody joins at the far site."""
    flow = start(_RUNFILE, bench.overrides(_ELSEWHERE), bench.stack)
    with _ended(_join(bench)):
        return bench.result(flow)


def _deployed(bench: _Bench) -> dict[str, Any]:
    """The flow at one site calls the deployment of the other."""
    prefect = [sys.executable, "-m", "prefect"]
    near_env = {**os.environ, **bench.stack.env()}
    file = str(ROOT / "examples" / "prefect" / "two_sites.yaml")
    for words in (
        ["work-pool", "create", "near", "--type", "process"],
        ["work-pool", "create", "far", "--type", "process"],
        ["deploy", "--all", "--no-prompt", "--prefect-file", file],
    ):
        subprocess.run([*prefect, *words], cwd=ROOT, env=near_env, check=True, capture_output=True)
    near, far = (
        [*prefect, "worker", "start", "--pool", pool, "--type", "process"] for pool in ("near", "far")
    )
    overrides = f"overrides={json.dumps(bench.overrides(_ELSEWHERE))}"
    run = ["deployment", "run", "train/near", "--watch", "-p", f"runfile={_RUNFILE}", "-p", overrides]
    with (
        _ended(_quiet(near, near_env, bench.folder / "near.log")),
        _ended(_quiet(bench.link.at_far(far), bench.far_env, bench.folder / "far.log")),
    ):
        flow = psutil.Popen(
            [*prefect, *run], env=near_env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return bench.result(flow)


def _quiet(words: Sequence[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(words, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A process that is to end with what is done in the meantime."""
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _join(bench: _Bench) -> subprocess.Popen[bytes]:
    """What somebody types at the far site, as soon as there is a run."""
    store = bench.store
    until = time.monotonic() + _START_S
    while not (runs := runs_of(open_store(store))):
        if time.monotonic() > until:
            raise RuntimeError(f"no run within {_START_S:.0f} s")
        time.sleep(0.5)
    words = [sys.executable, "-m", "flows.cli", "join", runs[0], "--store", store, "--site", "far"]
    return _quiet(bench.link.at_far(words), bench.far_env, bench.folder / "far.log")


def _result(record: RunRecord, folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "runs" / record.id / "summary.json").read_text())
    everything = summary["result"][0]
    return {
        "before": round(everything["before"], 3), "reward": round(everything["after"], 3),
        "samples_per_s": round(summary["samples_per_s"], 1),
        "trainer_idle": round(summary["trainer_idle"], 3), "seconds": round(summary["training_s"], 1),
    }  # fmt: skip

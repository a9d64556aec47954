"""The share of a processor that trackers and the figures for Prometheus take.

    share      of one core, with a step every second (most runs are slower) and all metrics that there are;
               less what the bench itself takes to write the metrics. Child processes count
    start_s    processor seconds until the tracker has its first step, once in a run: imports above all
    scrape_ms  processor time of an answer at /metrics; `share` is with one every 15 s

No server is reached: wandb is offline, mlflow has a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from flows.monitoring.exporter import exporting
from flows.monitoring.process_figures import OF_ALL, OF_ROLE
from flows.view.run_view import RunView
from infra.choices import cores
from infra.runs import RunRecord
from schemas.messages import Heartbeat, StepRecord
from schemas.metrics import METRICS
from schemas.tracking import TRACKERS
from tests.bench._runs import ROOT
from tests.factories import make_spec
from tests.fakes.fill import fill

_SCRAPE_S = 15.0


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench tracking")
    parser.add_argument("--seconds", type=float, default=20.0 if quick else 120.0)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two steps")
    parser.add_argument("--generators", type=int, nargs="*", default=[2, 1000])
    given = parser.parse_args(argv)
    console, rows = Console(stderr=True), list[dict[str, Any]]()
    alone = 0.0
    for tracker in ("", *TRACKERS.built_in()):
        console.print(f"{tracker or 'no tracker'} …")
        found = _tracked(tracker, given.seconds, given.every)
        share = found["cpu_s"] / found["seconds"]
        alone = alone if tracker else share
        if tracker:
            rows.append({"what": tracker, "share": share - alone, "start_s": found["start_cpu_s"]})
    for generators in given.generators:
        scrape_s = _scraped(generators)
        what = f"prometheus, {generators} generators"
        rows.append({"what": what, "share": scrape_s / _SCRAPE_S, "scrape_ms": 1e3 * scrape_s})
    console.print(_table(rows))
    return {"rows": rows, "cores": cores()}


def _tracked(tracker: str, seconds: float, every_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench._tracked_run", tracker, str(seconds), str(every_s), folder],
            cwd=ROOT, env=os.environ | {"TRACKIO_DIR": f"{folder}/trackio", "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False, timeout=seconds + 300,
        )  # fmt: skip
    line = next((one for one in done.stdout.splitlines() if one.startswith("TRACKED ")), None)
    if line is None:
        raise RuntimeError(done.stdout + done.stderr)
    found: dict[str, float] = json.loads(line.partition(" ")[2])
    return found


class _Watched:
    """A follower whose view stays."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def see(self, look: Callable[[RunView], Any]) -> Any:
        """Look at the view."""
        return look(self._view)


def _scraped(generators: int, times: int = 20) -> float:
    """Return the processor seconds of an answer at /metrics, and of reading it."""
    view = RunView("bench-1", make_spec())
    for role in OF_ROLE:
        for number in range(generators if role == "generator" else 1):
            counters = dict.fromkeys([*OF_ALL, *OF_ROLE[role]], 1.5)
            view.take(fill(Heartbeat, role=role, number=number, sent_at=time.time(), counters=counters))
    view.take(fill(StepRecord, groups=np.zeros(4), metrics=dict.fromkeys(METRICS, 0.5)))
    spec, said = make_spec(prometheus={"port": 0}), list[str]()
    record = RunRecord(id="bench-1", spec=spec, bootstrap_servers="", store="", model="", created_at=0.0)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        os.environ["STREAMRL_HOME"] = folder
        follower: Any = _Watched(view)
        with exporting(record, follower, said.append):
            url = said[0].rpartition(" ")[2]
            before = time.process_time()
            for _ in range(times):
                with urllib.request.urlopen(url, timeout=60) as answer:
                    answer.read()
            return (time.process_time() - before) / times


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("what", "share of a core", "start: CPU s", "answer: CPU ms")
    for row in rows:
        start, scrape = row.get("start_s"), row.get("scrape_ms")
        table.add_row(
            row["what"], f"{row['share']:.2%}", "" if start is None else f"{start:.1f}",
            "" if scrape is None else f"{scrape:.1f}",
        )  # fmt: skip
    return table

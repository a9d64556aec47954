"""A process of the bench `tracking`: a run's metrics come at a steady rate, and one tracker takes them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from flows.trackers.feeding import tracking
from flows.view.line_files import METRICS_FILE, LinesFile
from infra.runs import RunRecord
from schemas.metrics import METRICS
from tests.factories import make_spec

_START_S = 120.0


def main(tracker: str, seconds: float, every_s: float, folder: Path) -> dict[str, float]:
    """Return the processor seconds of this process and its children: until the first step, and from then on.

    An empty `tracker`: nobody takes the metrics, which are written all the same.
    """
    record, file = _record(tracker), LinesFile(folder / METRICS_FILE)
    before, said, step = used_s(), list[str](), 0
    with tracking(record, folder, said.append):
        file.append(row(step))
        until = time.monotonic() + _START_S
        while tracker and not list(folder.glob("trackers/*.json")) and time.monotonic() < until:
            time.sleep(0.1)
        begun, began_at = used_s(), time.monotonic()
        while (left := began_at + seconds - time.monotonic()) > 0:
            step += 1
            file.append(row(step))
            time.sleep(min(every_s, left))
        ended, passed = used_s(), time.monotonic() - began_at
    if said:
        raise RuntimeError(f"{tracker}: {said}")
    return {"start_cpu_s": begun - before, "cpu_s": ended - begun, "seconds": passed, "steps": step}


def _record(tracker: str) -> RunRecord:
    section: dict[str, Any] = {"kind": tracker} | ({"mode": "offline"} if tracker == "wandb" else {})
    spec = make_spec(trackers=[section] if tracker else [])
    return RunRecord(id="bench-1", spec=spec, bootstrap_servers="", store="", model="", created_at=0.0)


def row(step: int) -> str:
    """A line of metrics.jsonl with all metrics that there are."""
    values = {name: 0.1 * step + place for place, name in enumerate(METRICS)}
    return json.dumps(values | {"step": step, "version": step, "finished_at": time.time()})


def used_s() -> float:
    """Processor seconds of this process and its children."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


if __name__ == "__main__":
    tracker, seconds, every_s, folder = sys.argv[1:]
    print(f"TRACKED {json.dumps(main(tracker, float(seconds), float(every_s), Path(folder)))}")

"""Run a run file, and read runs: all of it is also in `streamrl` itself."""

from __future__ import annotations

from flows.run.reading import OpenRun, open_run
from flows.run.request import RunFailed, RunResult
from flows.run.without_prefect import train_plainly as train

__all__ = [
    "OpenRun",
    "RunFailed",
    "RunResult",
    "open_run",
    "train",
]

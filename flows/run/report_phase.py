"""The last phase: a process writes the report. It ends when this process ends."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys

import psutil

from flows.run.locations import Places, logs_folder, report_folder
from flows.run.request import RunFailed, RunResult
from infra.code import module
from infra.runs import RunRecord
from infra.supervise.team import Ended, Team
from infra.waiting import Wait, WaitedTooLong

STILL_S = 600.0


def make_report(record: RunRecord, places: Places) -> RunResult:
    """Have the report written. Returns the result. Raises RunFailed if the report can't be written."""
    folder = report_folder(record)
    argv = [
        sys.executable, "-m", module("flows.run.report"), "--store", places.store_url, "--run", record.id,
        "--folder", str(folder),
    ]  # fmt: skip
    env = places.env | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    again = f"to write it again: {shlex.join(['python', *argv[1:]])}"
    trained = f"run {record.id} is trained to its end, and its weights are in the store"
    with Team(logs_folder(record), grace_s=2.0) as team:
        ended = _ended(team, team.start("report", argv, env))
        if ended is None:
            raise RunFailed(
                f"{trained}; but the process that writes its report did nothing for {STILL_S:g} s; "
                f"its log is {team.log('report')}\n{again}"
            )
    if ended.code or ended.signal:
        raise RunFailed(f"{trained}; but its report can't be written: {ended.story}\n{again}")
    return RunResult(record.id, folder, json.loads((folder / "summary.json").read_text()))


def _ended(team: Team, process: int) -> Ended | None:
    """Wait for a process and return how it ended; None if it did nothing for STILL_S seconds.

    There is no deadline while it does anything: a large model takes long to be written.
    """
    wait, before = Wait("the report", unblocked_by="its process", deadline_s=STILL_S), 0.0
    while True:
        if found := team.poll(1.0):
            return found[0]
        if (done := _done(process)) > before:
            before = done
            wait.progress()
        try:
            wait.check()
        except WaitedTooLong:
            return None


def _done(process: int) -> float:
    """Return processor time plus bytes, a number that grows while the process does anything."""
    with contextlib.suppress(psutil.Error, AttributeError):
        found = psutil.Process(process)
        counted = found.io_counters()
        return float(sum(found.cpu_times()[:2])) + counted.read_chars + counted.write_chars
    return 0.0

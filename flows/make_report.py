"""The last phase: have the report written, by a process that is ended with us."""

from __future__ import annotations

import json
import sys

from flows.places import Places, logs_folder, report_folder
from flows.request import Result, RunFailed
from infra.runs import RunRecord
from infra.supervise.team import Team

DEADLINE_S = 600.0


def make_report(record: RunRecord, places: Places) -> Result:
    """Write the report folder; returns the result that stands in it."""
    folder = report_folder(record)
    argv = [
        sys.executable, "-m", "flows.report", "--store", places.store_url, "--run", record.id,
        "--folder", str(folder),
    ]  # fmt: skip
    env = places.env | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with Team(logs_folder(record), grace_s=2.0) as team:
        team.start("report", argv, env)
        ended = team.poll(DEADLINE_S)
    if not ended:
        raise RunFailed(
            f"the report of {record.id} was not written within {DEADLINE_S:g} s: {team.log('report')}"
        )
    if ended[0].code or ended[0].signal:
        raise RunFailed(f"run {record.id} is trained, but its report can't be written: {ended[0].story}")
    return Result(record.id, folder, json.loads((folder / "summary.json").read_text()))

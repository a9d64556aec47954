"""Registers a run file as a deployment: from any folder, from a clone or from the wheel.

The deployment names our module, not a file of a clone, and the run file by its whole path. Home and store
are part of it, so that a worker of any environment finds the same broker and the same runs.
"""

from __future__ import annotations

import datetime
import os
import zoneinfo
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import InvalidNameError, ObjectAlreadyExists
from prefect.flows import EntrypointType
from prefect.schedules import Cron, Interval, Schedule

from flows.flow_runs.automations import ensure_automations
from flows.flow_runs.prefect_host import task_name
from flows.train import train
from infra.code import ROOT, module
from infra.runs import RunError
from schemas.runspec import RunSpec

Overlap = Literal["wait", "skip", "allow"]
_STRATEGIES = {"wait": ConcurrencyLimitStrategy.ENQUEUE, "skip": ConcurrencyLimitStrategy.CANCEL_NEW}


@dataclass(frozen=True, slots=True)
class Deploying:
    """The deployment that is wanted. `overlap`: what a start does while another one goes on."""

    runfile: Path
    spec: RunSpec
    name: str
    pool: str
    home: Path
    overrides: Sequence[str] = ()
    resume: str | bool | None = None
    cron: str | None = None
    interval_s: float | None = None
    overlap: Overlap = "wait"

    @property
    def full_name(self) -> str:
        """The name by which Prefect's commands know the deployment."""
        return f"{train.name}/{self.name}"


def deploy_run_file(wanted: Deploying) -> None:
    """Register a deployment, or change the one of that name. Makes its work pool if that is not there.

    Raises RunError, and has made nothing, if Prefect does not take its name or its times.
    """
    schedules = _schedules(wanted)
    try:
        deployment = _deployment(wanted, schedules)
    except InvalidNameError as error:
        raise RunError(f"--name {wanted.name}: {error}") from None
    with get_client(sync_client=True) as client:
        _make_pool(client, wanted.pool)
        ensure_automations(lambda path, body: client.request("POST", path, json=body).json())
    deployment.apply()


def _deployment(wanted: Deploying, schedules: list[Schedule]) -> RunnerDeployment:
    return train.to_deployment(
        name=wanted.name,
        description=_description(wanted),
        parameters=_parameters(wanted),
        schedules=schedules,
        concurrency_limit=_limit(wanted.overlap),
        work_pool_name=wanted.pool,
        job_variables=job_variables(wanted.home),
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def _description(wanted: Deploying) -> str:
    return f"Train by {wanted.runfile}: task {task_name(wanted.spec)}, {wanted.spec.algorithm.mode}."


def _make_pool(client: SyncPrefectClient, name: str) -> None:
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=name, type="process"))


def _parameters(wanted: Deploying) -> dict[str, Any]:
    return {"runfile": str(wanted.runfile), "overrides": list(wanted.overrides), "resume": wanted.resume}


def _schedules(wanted: Deploying) -> list[Schedule]:
    if wanted.cron:
        try:
            return [Cron(wanted.cron, timezone=_time_zone())]
        except ValueError:
            raise RunError(
                f"--cron {wanted.cron!r} says no times: minute, hour, day, month and weekday, as '0 2 * * 6'"
            ) from None
    if wanted.interval_s:
        return [Interval(datetime.timedelta(seconds=wanted.interval_s))]
    return []


def _time_zone() -> str | None:
    """Return the name of this machine's time zone; None, for UTC, if it has no name."""
    name = os.environ.get("TZ") or os.path.realpath("/etc/localtime").partition("/zoneinfo/")[2]
    return name if name in zoneinfo.available_timezones() else None


def _limit(overlap: Overlap) -> ConcurrencyLimitConfig | None:
    if overlap == "allow":
        return None
    return ConcurrencyLimitConfig(limit=1, collision_strategy=_STRATEGIES[overlap])


def job_variables(home: Path) -> dict[str, Any]:
    """Return the variables of a flow run's process. Credentials are left to the worker."""
    clone = str(ROOT) if module("flows") == "flows" else None  # a wheel is found without
    paths = dict.fromkeys(filter(None, [clone, os.environ.get("PYTHONPATH")]))
    env = {"STREAMRL_HOME": str(home)} | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})
    return {"working_dir": str(Path.cwd()), "env": env}

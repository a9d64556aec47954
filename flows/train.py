"""The Prefect flow `train`: a run, with its phases as tasks.

`flows.run.without_prefect.train_plainly` does the same with no Prefect installed or running.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any
from uuid import UUID

from prefect import flow, get_run_logger, task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelled as PrefectCancelled
from pydantic import Field

from flows.run.phases import conduct
from flows.run.request import RunCancelled, RunRequest, RunResult
from flows.run.without_prefect import train_plainly
from flows.view.live import number, one_line
from flows.view.run_view import RunView
from flows.view.screen import Screen, Screens
from infra.runs import RunRecord

__all__ = ["train", "train_plainly"]

ARTIFACT_EVERY_S = 10.0
ASK_EVERY_S = 3.0

# More screens: the command line adds its terminal. Not a parameter, since Prefect shows and stores those.
watchers: list[Screen] = []


@flow(name="train", description="Train a language model by a run file, and watch over all its processes.")
def train(
    runfile: Annotated[str, Field(min_length=1, description="The run file: a YAML file.")],
    overrides: Annotated[list[str], Field(description="Settings of the run file to change: a.b=c.")] = [],  # noqa: B006 - never changed; Prefect shows it
    resume: Annotated[
        str | bool | None, Field(description="A run's id to go on with; true: the newest.")
    ] = None,
) -> Any:
    """Run a run file to its end. If it is cancelled or killed, the flow leaves no process of the run."""
    screen = Screens([PrefectScreen(), *watchers])
    request = RunRequest(runfile, tuple(overrides), resume)
    try:
        result = conduct(
            request, screen, as_phase=_as_task, told_to_stop=_cancelled_by_prefect(), call_site=_call_site
        )
    except RunCancelled as cancelled:
        return PrefectCancelled(message=str(cancelled))
    _publish(result)
    return {"run": result.run, "report": str(result.report), **result.summary}


def _as_task(function: Callable[..., Any]) -> Callable[..., Any]:
    # Arguments and results are live objects: Prefect must not hash, store or inspect them.
    return task(
        function, name=function.__name__.replace("_", " "), cache_policy=NO_CACHE, persist_result=False
    )


class PrefectScreen:
    """A screen that writes news to the flow run's log, and the state of the run to a progress artifact."""

    def __init__(self) -> None:
        self._log = get_run_logger()
        self._artifact: UUID | None = None
        self._next, self._percent = 0.0, 0.0

    def say(self, text: str) -> None:
        self._log.info("%s", text)

    def progress(self, fraction: float, text: str) -> None:
        if self._due():
            self._log.info("%3.0f%% %s", 100 * fraction, text)

    def show(self, view: RunView) -> None:
        percent = min(100.0, 100.0 * view.iterations_begun() / view.spec.algorithm.iterations)
        if not self._due() and (percent < 100.0 or self._percent == percent):
            return
        self._log.info("%s", one_line(view))
        with suppress(Exception):  # an artifact must not end the run: the server may be busy or away
            if self._artifact is None:
                self._artifact = _id(
                    create_progress_artifact(percent, key=f"{view.run}-progress", description=view.run)
                )
            else:
                update_progress_artifact(self._artifact, progress=percent, description=one_line(view))
            self._percent = percent  # not set after an error, so that it is tried again

    def _due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + ARTIFACT_EVERY_S
        return True


def _id(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(str(value))


def _cancelled_by_prefect() -> Callable[[], bool]:
    """Return a function that asks Prefect every few seconds whether the flow run was cancelled.

    A worker kills the process of a cancelled flow run, but a flow run from a terminal has no worker.
    """
    run_id, asked_at = flow_run.id, time.monotonic()

    def told() -> bool:
        nonlocal asked_at
        if run_id is None or time.monotonic() - asked_at < ASK_EVERY_S:
            return False
        asked_at = time.monotonic()
        with suppress(Exception), get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(run_id)).state
            return state is not None and (state.is_cancelling() or state.is_cancelled())
        return False

    return told


def _call_site(record: RunRecord, site: str) -> bool:
    """Start a site's deployment. Returns False if there is none."""
    name = f"sync-weights/{site}"
    try:
        run_deployment(name, parameters={"run": record.id, "site": site, "store": record.store}, timeout=0)
    except ObjectNotFound:
        get_run_logger().warning("there is no deployment %s", name)
        return False
    get_run_logger().info("deployment %s has been called", name)
    return True


def _publish(result: RunResult) -> None:
    """Show the result as Prefect artifacts."""
    with suppress(Exception):  # the run is done: an artifact that can't be made does not undo it
        if rows := result.summary["result"]:
            create_table_artifact(
                rows, key=f"{result.run}-result", description=f"Held-out reward of {result.run}"
            )
        create_markdown_artifact(
            markdown(result), key=f"{result.run}-report", description=f"Report of {result.run}"
        )
        create_link_artifact(
            result.report.absolute().as_uri(), key=f"{result.run}-folder", link_text="report folder"
        )


def markdown(result: RunResult) -> str:
    """Return the result as a page in Markdown."""
    summary = result.summary
    lines = [f"# {result.run}", "", "| | problems | before | after | gain |", "|---|---|---|---|---|"]
    for row in summary["result"]:
        numbers = [number(row[name], 3) for name in ("before", "after", "gain")]
        lines.append(f"| {row['what']} | {row['problems']} | {' | '.join(numbers)} |")
    counts = f"{summary['iterations']} iterations, {summary['samples']} samples"
    lines += ["", f"{counts}, {summary['dead_letters']} dead letters. Report: `{result.report}`"]
    return "\n".join(lines)

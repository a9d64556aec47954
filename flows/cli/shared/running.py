"""Runs a request in this process: as a Prefect flow if a server answers, else as plain calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.run.request import RunCancelled, RunRequest, RunResult
from flows.run.without_prefect import train_plainly
from flows.view.live import terminal
from flows.view.screen import Screen
from infra.stack import local
from infra.stack.prefect_server import healthy

SEND_S = 10.0
BUSY_S = 30.0


def run_here(
    request: RunRequest, console: Console, *, prefect: bool, news: Callable[[Screen], Screen] | None = None
) -> RunResult:
    """Run a request to its end; with `prefect` as a flow, if a Prefect server answers.

    `news`: called with the screen, on which it may say something from a thread of its own. It returns the
    screen that the run is shown on.
    """
    env = prefect_environment() if prefect else {}
    with terminal(console) as screen:
        if news is not None:
            screen = news(screen)
        if env:
            return _as_flow(request, screen, env)
        if prefect:
            screen.say("no Prefect server is up (`streamrl up` starts one): the run goes on without Prefect")
        return train_plainly(request.runfile, request.overrides, request.resume, screen=screen)


def prefect_environment() -> dict[str, str]:
    """Return the variables for the user's Prefect server, else for the local one; empty if none answers."""
    own = os.environ.get("PREFECT_API_URL")
    if own and healthy(own, BUSY_S):
        return {"PREFECT_API_URL": own}
    stack = local.current()
    if stack.prefect_api_url is None or not healthy(stack.prefect_api_url, BUSY_S):
        return {}
    return {name: value for name, value in stack.env().items() if name.startswith(("PREFECT_", "DO_NOT"))}


def _as_flow(request: RunRequest, screen: Screen, env: dict[str, str]) -> RunResult:
    # Prefect reads these when it is imported. Its lines would tear the live view: only the server gets them.
    os.environ.update(env)
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
    screen.say(f"this run is a flow of the Prefect server at {env['PREFECT_API_URL'].removesuffix('/api')}")
    from prefect.exceptions import CancelledRun

    from flows.train import train

    _keep_states_true()
    with _everything_sent(), _seen_by(screen), _quick_end():
        try:
            found: dict[str, Any] = train(request.runfile, list(request.overrides), request.resume)
        except CancelledRun as cancelled:
            raise RunCancelled(str(cancelled)) from None
    return RunResult(found.pop("run"), Path(found.pop("report")), found)


def _keep_states_true() -> None:
    """Make the automations that call a flow run crashed when it is killed. A server may refuse."""
    from prefect.client.orchestration import get_client

    from flows.flow_runs.automations import ensure_automations

    with suppress(Exception), get_client(sync_client=True) as client:
        ensure_automations(lambda path, body: client.request("POST", path, json=body).json())


@contextmanager
def _seen_by(screen: Screen) -> Iterator[None]:
    from flows.train import watchers

    watchers.append(screen)
    try:
        yield
    finally:
        watchers.remove(screen)


@contextmanager
def _everything_sent() -> Iterator[None]:
    """Send all of Prefect's logs and events at the end of the block.

    Otherwise Prefect's threads send the last of them at exit. If the server is stopped before that, as `demo`
    does, the exit tries in vain for a minute.
    """
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    try:
        yield
    finally:
        for worker in (APILogWorker, EventsWorker):
            worker.drain_all(timeout=SEND_S)


@contextmanager
def _quick_end() -> Iterator[None]:
    """Turn off Prefect's heartbeats: the flow ends a second sooner, and has a sign of life of its own."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield

"""Pauses the flow run of a run, and lets it go on, as the buttons of Prefect's pages do."""

from __future__ import annotations

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.states import Paused, Suspended

from flows.flow_runs.prefect_host import run_tag
from infra.runs import RunError


def pause_run(run: str) -> bool:
    """Pause a run. Returns whether its process ends and frees the machine; if not, it waits there."""
    with get_client(sync_client=True) as client:
        found = _flow_run(client, run, StateType.RUNNING)
        state = Suspended() if found.deployment_id else Paused()
        _accepted(run, client.set_flow_run_state(found.id, state))
        return bool(found.deployment_id)


def unpause_run(run: str) -> bool:
    """Let a paused run go on. Returns whether a worker must start it again; if not, its process is there."""
    with get_client(sync_client=True) as client:
        found = _flow_run(client, run, StateType.PAUSED)
        suspended = bool(found.state and found.state.state_details.pause_reschedule)
        _accepted(run, client.resume_flow_run(found.id))
        return suspended


def _flow_run(client: SyncPrefectClient, run: str, state: StateType) -> FlowRun:
    """Return the one flow run of a run in a state. Raises RunError if there are none or several."""
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            tags=FlowRunFilterTags(all_=[run_tag(run)]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[state])),
        ),
        limit=20,
    )
    if not found:
        raise RunError(
            f"the Prefect server at {client.api_url} has no {state.value.lower()} flow run of {run}. A run "
            f"without Prefect is stopped by Ctrl-C, and goes on by: streamrl run FILE --resume {run}"
        )
    if len(found) > 1:
        ids = ", ".join(str(one.id) for one in found)
        raise RunError(
            f"several {state.value.lower()} flow runs belong to runs called {run}: {ids}. Choose one on "
            "Prefect's pages"
        )
    return found[0]


def _accepted(run: str, answer: object) -> None:
    if getattr(answer, "status", None) != SetStateStatus.ACCEPT:
        reason = getattr(getattr(answer, "details", None), "reason", None) or "no reason is given"
        raise RunError(f"Prefect refuses to change the state of {run}: {reason}")

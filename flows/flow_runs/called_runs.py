"""Flow runs that a run has called, found by a tag that names the run: any start of it finds them."""

from __future__ import annotations

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort

_OPEN = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING]


def open_flow_runs(client: SyncPrefectClient, tag: str) -> list[FlowRun]:
    """Return the newest flow run with a tag that has not ended, if there is one."""
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            tags=FlowRunFilterTags(all_=[tag]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_OPEN)),
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=1,
    )

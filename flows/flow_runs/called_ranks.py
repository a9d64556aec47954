"""Ranks of a trainer that are flow runs of Prefect deployments, called elsewhere as the run starts."""

from __future__ import annotations

from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment

from flows.flow_runs.called_runs import open_flow_runs
from infra.runs import RunRecord


def call_for_ranks(record: RunRecord, deployment: str, ranks: int) -> bool:
    """Call a deployment of `join-run` for so many ranks. Return False if a flow run of it goes on.

    One that an earlier start of the run has called still holds its ranks, and waits for the new start.
    """
    tag = f"ranks:{record.id}:{deployment}"
    with get_client(sync_client=True) as client:
        if open_flow_runs(client, tag):
            return False
    parameters = {"run": record.id, "store": record.store, "ranks": ranks}
    run_deployment(deployment, parameters=parameters, timeout=0, tags=[tag])
    return True

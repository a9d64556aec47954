"""Ranks of a trainer that are flow runs of Prefect deployments, called elsewhere as the run starts."""

from __future__ import annotations

from http import HTTPStatus

from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from flows.flow_runs.called_runs import open_flow_runs
from flows.run.host import CannotCall
from infra.runs import RunRecord
from schemas.shortening import bounded

_SETTING = "placement.ranks.deployments"
_REFUSED = (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY)  # parameters that a flow does not take


def call_for_ranks(record: RunRecord, deployment: str, ranks: int) -> bool:
    """Call a deployment of `join-run` for so many ranks. Return False if a flow run of it goes on.

    One that an earlier start of the run has called still holds its ranks, and waits for the new start.
    """
    if "/" not in deployment:
        raise CannotCall(f"{_SETTING}: {deployment} names no flow, as join-run/{deployment} does")
    # a run of another store, or one that was removed, may have had this id
    tag = f"ranks:{record.id}:{record.identity[:8]}:{deployment}"
    with get_client(sync_client=True) as client:
        if open_flow_runs(client, tag):
            return False
    parameters = {"run": record.id, "store": record.store, "ranks": ranks}
    try:
        run_deployment(deployment, parameters=parameters, timeout=0, tags=[tag])
    except ObjectNotFound:
        raise CannotCall(f"there is no Prefect deployment {deployment} ({_SETTING})") from None
    except PrefectHTTPStatusError as error:
        if error.response.status_code not in _REFUSED:  # an error of the server, or of the way there
            raise
        raise CannotCall(
            f"{_SETTING}: {deployment} does not take a run and a number of ranks, as the flow join-run does: "
            f"{bounded(error.response.text)}"
        ) from error
    return True

"""Prepares a Prefect server by plain HTTP: its work pool, and the automations that keep states true.

Importing Prefect would take seconds.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from flows.flow_runs.automations import ensure_automations

POOL = "local"
_THERE_ALREADY = 409


def prepare_server(api_url: str) -> None:
    """Make what is not there: the work pool that prefect.yaml names, and our automations."""
    ensure_pool(api_url)
    ensure_automations(lambda path, body: _post(f"{api_url}{path}", body))


def ensure_pool(api_url: str, name: str = POOL) -> None:
    """Make a work pool of processes if it is not there."""
    wanted = {"name": name, "type": "process", "description": "Runs on the machine of the worker."}
    try:
        _post(f"{api_url}/work_pools/", wanted)
    except urllib.error.HTTPError as error:
        if error.code != _THERE_ALREADY:
            raise


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(  # noqa: S310 - the server that was just started
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        return json.load(answer)

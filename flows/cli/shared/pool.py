"""Makes the work pool that prefect.yaml names. `streamrl up` does so, so that `prefect deploy` finds it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

POOL = "local"


def ensure_pool(api_url: str) -> None:
    """Make the work pool if it is not there, by plain HTTP: importing Prefect would take seconds."""
    wanted = {"name": POOL, "type": "process", "description": "Runs on the machine of the worker."}
    request = urllib.request.Request(  # noqa: S310 - the server that was just started
        f"{api_url}/work_pools/", json.dumps(wanted).encode(), {"content-type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        if error.code != 409:  # it is there already
            raise

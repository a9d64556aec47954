"""The Prefect flow `verify`: an audit of all versions of weights. It fails if anything is wrong.

`streamrl weights verify` does the same with no Prefect installed or running.
"""

from __future__ import annotations

import time
from typing import Any

from prefect import flow

from flows.audit import Audit
from flows.told import Url, told
from flows.weights import newest
from infra.weights.errors import WeightsError
from infra.weights.places import weights_at


@flow(name="verify", description="Audit all versions of weights: manifests, objects, and where ways lead.")
def verify(url: Url) -> dict[str, Any]:
    """Read everything; what was read and how long it took. Raises if anything is wrong."""
    weights, since = weights_at(url), time.monotonic()
    version, audit = newest(weights, url, None), Audit(weights)
    problems = list(audit.problems())
    row = {"version": version, "versions": len(audit.versions), "bytes": audit.size, "wrong": audit.wrong}
    row = told("verify", "\n\n".join([f"Audit of {url}", *problems]), row, since=since)
    if problems:
        raise WeightsError(f"{audit.wrong} things are wrong with {url}: {'; '.join(problems[:3])}")
    return row

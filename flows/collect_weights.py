"""The Prefect flow `collect`: remove old versions of weights, and objects that none names any more.

`streamrl weights collect` does the same with no Prefect installed or running.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.told import Url, told
from flows.weights import newest
from infra.weights.garbage import GRACE_S
from infra.weights.places import weights_at


@flow(name="collect", description="Remove old versions of weights, and objects that none names any more.")
def collect(
    url: Url,
    keep: Annotated[int, Field(ge=1, description="So many of the newest versions stay.")] = 16,
    grace_s: Annotated[
        float, Field(ge=0, description="Seconds that an object stays after no version names it any more.")
    ] = GRACE_S,
) -> dict[str, Any]:
    """Remove them, and what killed writes left; what was removed, what is left and how long it took."""
    weights, since = weights_at(url), time.monotonic()
    newest(weights, url, None)
    found, orphans = weights.collect(keep, grace_s=grace_s), weights.sweep()
    row = {
        "version": found.kept[-1], "oldest": found.kept[0], "removed": len(found.removed),
        "objects removed": found.chunks,
        "killed writes": orphans, "objects that go later": found.waiting, "bytes": found.size,
    }  # fmt: skip
    return told("collect", f"Garbage of {url}", row, since=since)

"""The Prefect flow `keyframe`: a short way to a version of weights for those who join late.

`streamrl weights keyframe` does the same with no Prefect installed or running.
"""

from __future__ import annotations

import time
from typing import Any

from prefect import flow

from flows.told import Url, Version, told
from flows.weights import newest
from infra.weights.places import weights_at


@flow(name="keyframe", description="Give a version of weights a way from nothing, for those who join late.")
def keyframe(url: Url, version: Version = None) -> dict[str, Any]:
    """Put it, unless the version has one; what it is and how long it took."""
    weights, since = weights_at(url), time.monotonic()
    manifest, new = weights.add_keyframe(newest(weights, url, version))
    path = manifest.path(None)
    assert path is not None
    row = {"version": manifest.version, "new": new, "bytes": path.size, "bytes of the model": manifest.size}
    return told("keyframe", f"A way from nothing in {url}", row, since=since)

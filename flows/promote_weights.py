"""The Prefect flow `promote`: a version of weights as a Hugging Face checkpoint, on the worker's machine.

`streamrl weights promote` does the same with no Prefect installed or running.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.origin import Origin
from flows.promote import promote as write
from flows.promote import where_to_read
from flows.told import Url, Version, told
from flows.weights import newest
from infra.weights.places import seen_at, weights_at


@flow(name="promote", description="Write a version of weights as a Hugging Face checkpoint.")
def promote(
    url: Url,
    folder: Annotated[str, Field(min_length=1, description="A new or empty folder.")],
    version: Version = None,
    base: Annotated[
        str | None, Field(description="Folder of the model that it began with; a run's is known.")
    ] = None,
    adapter: Annotated[bool, Field(description="Of an adapter: it alone, for peft.")] = False,
) -> dict[str, Any]:
    """Write it; what was written and how long it took."""
    weights, since = weights_at(url), time.monotonic()
    seen = seen_at(url)
    number = newest(weights, url, version, seen)
    found = write(weights, Origin.at(url, base), number, Path(folder), adapter=adapter)
    seen.remember(number)
    row = {"version": number, "folder": str(found.folder), "bytes": found.size}
    return told("promote", f"Version {number} of {url}: `{where_to_read(found)}`", row, since=since)

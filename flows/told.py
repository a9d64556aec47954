"""What the flows about weights are asked and how they tell what they did."""

from __future__ import annotations

import time
from typing import Annotated, Any

from prefect import get_run_logger
from prefect.artifacts import create_table_artifact
from pydantic import Field

Url = Annotated[str, Field(min_length=1, description="Where the versions are: s3://…/runs/count-1/weights.")]
Version = Annotated[int | None, Field(ge=0, description="By default the newest.")]


def told(key: str, text: str, row: dict[str, Any], *, since: float) -> dict[str, Any]:
    """A row with its seconds, to the log and as an artifact. `since`: when it began, as monotonic() says."""
    row = {**row, "seconds": round(time.monotonic() - since, 2)}
    get_run_logger().info("%s: %s", text, row)
    try:
        create_table_artifact([row], key=key, description=text)
    except Exception as error:  # it is done: an artifact that can't be made does not undo it
        get_run_logger().warning("the artifact %s can't be made: %s", key, error)
    return row

"""Finds versions of weights by whatever a user calls them: a run's id, a path, or a URL."""

from __future__ import annotations

from pathlib import Path

from flows.run.locations import store_url, use_local_keys
from infra.runs import runs_of
from infra.stores.opening import open_store
from infra.weights.weights_error import WeightsError
from schemas.addresses import LOCAL


def series_url(said: str) -> str:
    """Return the URL of a series of versions. A word alone is the id of a run in this machine's store.

    Raises WeightsError if there is no such run.
    """
    if "://" in said:
        use_local_keys(said)
        return said
    if "/" in said or said.startswith("."):
        return f"file://{Path(said).expanduser().absolute()}"
    local = store_url(LOCAL)
    known = runs_of(open_store(local))
    if said in known:
        return f"{local}/runs/{said}/weights"
    there = ", ".join(known[-5:]) or "none"
    raise WeightsError(
        f"there is no run {said} in {local}; the newest there: {there}. A folder is written as a path, "
        f"./{said}, and a run of another store as URL/runs/{said}/weights"
    )

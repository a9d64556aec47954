"""Opens weights by the URL of their folder: those of a run, or any other series of versions.

s3://bucket/store/runs/count-1/weights      the weights of run count-1
s3://bucket/models/mine                     a series without a run, named after its folder
"""

from __future__ import annotations

import contextlib
import re

from infra.runs import RunError, find, unique_name
from infra.stores.opening import open_store
from infra.weights.seen import Seen
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError


def run_at(url: str) -> tuple[str, str] | None:
    """Return the store and the id of the run whose weights are at a URL; None if it is not a run's folder."""
    found = re.fullmatch(r"(.+://.+)/runs/([^/]+)/weights", url.rstrip("/"))
    return (found[1], found[2]) if found else None


def seen_at(url: str) -> Seen:
    """Return what this machine has verified of a series. A run is known by identity, not by name."""
    if of_run := run_at(url):
        with contextlib.suppress(RunError):  # the weights were copied without their run
            return Seen(unique_name(find(open_store(of_run[0]), of_run[1])))
    return Seen(url.rstrip("/"))


def weights_at(url: str, *, threads: int = 1) -> WeightStore:
    """Open the versions in a folder of an object store. Raises WeightsError if the URL names no folder."""
    scheme, _, path = url.rstrip("/").partition("://")
    above, _, name = path.rpartition("/")
    if not above or not name:
        raise WeightsError(
            f"{url!r} is no folder of weights: a URL is expected, such as file:///models/mine, "
            "s3://bucket/models/mine or s3://bucket/store/runs/count-1/weights"
        )
    if of_run := run_at(url):
        return WeightStore(open_store(of_run[0]), of_run[1], threads=threads)
    return WeightStore(open_store(f"{scheme}://{above}"), name, prefix=name, threads=threads)

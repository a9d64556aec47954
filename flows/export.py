"""A version of a run as a Hugging Face folder, by the run's id: see `flows.promote`."""

from __future__ import annotations

from pathlib import Path

from flows.origin import Origin
from flows.promote import Promoted, promote
from flows.weights import newest
from flows.writing import Progress
from infra.runs import RunRecord
from infra.sites.place import owner_of
from infra.store import Store
from infra.weights.seen import Seen
from infra.weights.versions import WeightStore


def export(
    record: RunRecord, store: Store, target: Path | None = None, *, version: int | None = None,
    adapter: bool = False, replace: bool = False, progress: Progress = lambda share, text: None,
) -> Promoted:  # fmt: skip
    """Write a version, by default the newest, into a folder that is empty, not there, or to be replaced."""
    weights, origin, seen = WeightStore(store, record.id), Origin.of_run(record), Seen(owner_of(record))
    number = newest(weights, origin.name, version, seen)
    target = target or Path(f"{record.id}-v{number}{'-adapter' if adapter else ''}")
    done = promote(weights, origin, number, target, adapter=adapter, replace=replace, progress=progress)
    seen.remember(number)
    return done

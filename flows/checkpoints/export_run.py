"""Writes a version of a run as a Hugging Face folder, by means of `flows.checkpoints.promote`."""

from __future__ import annotations

from pathlib import Path

from flows.checkpoints.folder_writer import ShareProgress
from flows.checkpoints.promote import Promoted, promote_version
from flows.checkpoints.push_and_pull import newest_version
from flows.checkpoints.version_source import VersionSource
from infra.runs import RunRecord, unique_name
from infra.stores.store import Store
from infra.weights.seen import Seen
from infra.weights.versions import WeightStore


def export_run(
    record: RunRecord, store: Store, target: Path | None = None, *, version: int | None = None,
    adapter: bool = False, replace: bool = False, progress: ShareProgress = lambda share, text: None,
) -> Promoted:  # fmt: skip
    """Write a version, by default the newest, into a folder, by default `<run>-v<version>`.

    The folder must be new or empty, unless `replace` is set.
    """
    weights, origin, seen = (
        WeightStore(store, record.id),
        VersionSource.of_run(record),
        Seen(unique_name(record)),
    )
    number = newest_version(weights, origin.name, version, seen)
    target = target or Path(f"{record.id}-v{number}{'-adapter' if adapter else ''}")
    done = promote_version(
        weights, origin, number, target, adapter=adapter, replace=replace, progress=progress
    )
    seen.remember(number)
    return done

"""The Prefect flows on versions of weights: keyframe, verify, collect and promote.

`streamrl weights` does the same with no Prefect installed or running.
"""

# Annotations are no text here: `serve()` pickles a flow's function, without the names that only text says.

import time
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from pydantic import Field

from flows.checkpoints.audit import Audit
from flows.checkpoints.promote import promote_version, where_to_read
from flows.checkpoints.push_and_pull import newest_version
from flows.checkpoints.version_source import VersionSource
from flows.flow_runs.watching import watched
from infra.weights.garbage import COLLECT_GRACE_S
from infra.weights.places import seen_at, weights_at
from infra.weights.weights_error import WeightsError

UrlParameter = Annotated[
    str, Field(min_length=1, description="Where the versions are: s3://…/runs/count-1/weights.")
]
VersionParameter = Annotated[int | None, Field(ge=0, description="By default the newest.")]


@flow(name="keyframe", description="Give a version of weights a way from nothing, for those who join late.")
def keyframe(url: UrlParameter, version: VersionParameter = None) -> dict[str, Any]:
    """Add a keyframe to a version unless it has one. Returns its size and the seconds it took."""
    with watched():
        weights, since = weights_at(url), time.monotonic()
        manifest, new = weights.add_keyframe(newest_version(weights, url, version))
        path = manifest.path(None)
        assert path is not None
        row = {
            "version": manifest.version,
            "new": new,
            "bytes": path.size,
            "bytes of the model": manifest.size,
        }
        return _reported("keyframe", f"Keyframe in {url}", row, since=since)


@flow(name="verify", description="Audit all versions of weights: manifests, objects, and where ways lead.")
def verify(url: UrlParameter) -> dict[str, Any]:
    """Read every version. Returns what was read and the seconds it took; raises if anything is wrong."""
    with watched():
        weights, since = weights_at(url), time.monotonic()
        version, audit = newest_version(weights, url, None), Audit(weights)
        problems = list(audit.problems())
        row = {"version": version, "versions": len(audit.versions), "bytes": audit.size, "wrong": audit.wrong}
        row = _reported("verify", "\n\n".join([f"Audit of {url}", *problems]), row, since=since)
        if problems:
            raise WeightsError(f"{audit.wrong} things are wrong with {url}: {'; '.join(problems[:3])}")
        return row


@flow(name="collect", description="Remove old versions of weights, and objects that none names any more.")
def collect(
    url: UrlParameter,
    keep: Annotated[int, Field(ge=1, description="So many of the newest versions stay.")] = 16,
    grace_s: Annotated[
        float, Field(ge=0, description="Seconds that an object stays after no version names it any more.")
    ] = COLLECT_GRACE_S,
) -> dict[str, Any]:
    """Remove old versions and leftovers of killed writes. Returns what went, what stays and the seconds."""
    with watched():
        weights, since = weights_at(url), time.monotonic()
        newest_version(weights, url, None)
        found, orphans = weights.collect(keep, grace_s=grace_s), weights.sweep()
        row = {
            "version": found.kept[-1], "oldest": found.kept[0], "removed": len(found.removed),
            "objects removed": found.chunks, "killed writes": orphans, "objects that go later": found.waiting,
            "bytes": found.size,
        }  # fmt: skip
        return _reported("collect", f"Garbage collection of {url}", row, since=since)


@flow(name="promote", description="Write a version of weights as a Hugging Face checkpoint.")
def promote(
    url: UrlParameter,
    folder: Annotated[str, Field(min_length=1, description="A new or empty folder on the worker's machine.")],
    version: VersionParameter = None,
    base: Annotated[
        str | None, Field(description="Folder of the model that it began with; a run's is known.")
    ] = None,
    adapter: Annotated[bool, Field(description="Of an adapter: it alone, for peft.")] = False,
) -> dict[str, Any]:
    """Write a version into a folder. Returns what was written and the seconds it took."""
    with watched():
        weights, since = weights_at(url), time.monotonic()
        seen = seen_at(url)
        number = newest_version(weights, url, version, seen)
        found = promote_version(weights, VersionSource.at(url, base), number, Path(folder), adapter=adapter)
        seen.remember(number)
        row = {"version": number, "folder": str(found.folder), "bytes": found.size}
        return _reported("promote", f"Version {number} of {url}: `{where_to_read(found)}`", row, since=since)


def _reported(key: str, text: str, row: dict[str, Any], *, since: float) -> dict[str, Any]:
    """Add the seconds since `since` (as monotonic() says), then log the row and keep it as an artifact."""
    row = {**row, "seconds": round(time.monotonic() - since, 2)}
    get_run_logger().info("%s: %s", text, row)
    try:
        create_table_artifact([row], key=key, description=text)
    except Exception as error:  # the work is done: an artifact that can't be made does not undo it
        get_run_logger().warning("the artifact %s can't be made: %s", key, error)
    return row

"""streamrl weights verify, keyframe, collect, promote"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.shared.talk import FAILED, INTERRUPTED, fail, out, shares, sigterm_interrupts
from flows.cli.shared.talk_weights import (
    AllowOlder,
    UrlArgument,
    VersionOption,
    bar,
    in_bytes,
    opened_weights,
    say,
)


def verify(url: UrlArgument) -> None:
    """Audit everything: manifests and their chain, every chunk, and that each way leads to its version."""
    from flows.checkpoints.audit import Audit

    audit = Audit(opened_weights(url))
    if not audit.versions:
        fail(f"{url} has no versions of weights")
    with bar("verifying") as progress:
        for problem in audit.problems(progress):
            out().print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    if audit.wrong:
        fail(f"{audit.wrong} things are wrong with {url}", FAILED)
    say(f"{len(audit.versions)} versions, all whole; {in_bytes(audit.size)} were read")


def keyframe(url: UrlArgument, version: VersionOption = None) -> None:
    """Add a keyframe to a version: a short way to fetch it whole, for readers that join late."""
    from flows.checkpoints.push_and_pull import newest_version

    weights = opened_weights(url)
    number = newest_version(weights, url, version)
    with bar(f"version {number}") as progress:
        manifest, new = weights.add_keyframe(number, progress)
    path = manifest.path(None)
    assert path is not None
    said = "has a keyframe now" if new else "had a keyframe already"
    say(f"version {number} {said}: {in_bytes(path.size)} to fetch for {in_bytes(manifest.size)} of weights")


def collect(
    url: UrlArgument,
    keep: Annotated[int, typer.Option("--keep", min=1, help="So many of the newest versions stay.")] = 16,
    grace_s: Annotated[
        float,
        typer.Option("--grace", min=0, help="Seconds that a chunk stays after no version names it any more."),
    ] = 120.0,
) -> None:
    """Remove old versions, and chunks that none names any more; what somebody reads or publishes stays.

    Leftovers of killed writes go too, once they are older than any write that may be alive. A chunk is only
    noted at first, and goes when this command is called again after the grace.
    """
    weights = opened_weights(url)
    found, orphans = weights.collect(keep, grace_s=grace_s), weights.sweep()
    if not found.kept:
        fail(f"{url} has no versions of weights")
    say(
        f"{len(found.removed)} versions, {found.chunks} chunks and {orphans} leftovers of killed writes are "
        f"gone; {len(found.kept)} versions from {found.kept[0]} on stay, in {in_bytes(found.size)}; a later "
        f"call removes {found.waiting} more chunks"
    )


def promote(
    url: UrlArgument,
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    version: VersionOption = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", help="Folder of the model it began with, for config and tokenizer; a run's is known."
        ),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a version that is an adapter: it alone, for peft.")
    ] = False,
    shard_gb: Annotated[
        float, typer.Option("--shard", min=0.001, help="GB of a file; what is larger is written in several.")
    ] = 4.0,
    allow_older: AllowOlder = False,
) -> None:
    """Write a version as a complete Hugging Face checkpoint. An adapter is merged into its base.

    Example: [bold]streamrl weights promote s3://bucket/mine models/mine[/bold]
    """
    from flows.checkpoints.promote import promote_version, where_to_read
    from flows.checkpoints.push_and_pull import newest_version
    from flows.checkpoints.version_source import VersionSource
    from infra.weights.places import seen_at

    weights, origin, seen = opened_weights(url), VersionSource.at(url, base), seen_at(url)
    number = newest_version(weights, url, version, seen, allow_older=allow_older)
    try:
        with sigterm_interrupts(), shares() as progress:
            promoted = promote_version(
                weights, origin, number, folder, adapter=adapter, shard=int(shard_gb * 1e9), progress=progress
            )
    except KeyboardInterrupt:
        fail("stopped; nothing was written", INTERRUPTED)
    seen.remember(number, lower=allow_older)
    say(
        f"version {number} is in {folder} ({in_bytes(promoted.size)}, every bit verified). Read it with\n"
        f"  {where_to_read(promoted)}"
    )


COMMANDS = (verify, keyframe, collect, promote)

"""streamrl ranker"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from flows.cli.shared.replay_options import ArchiveAlone
from flows.cli.shared.talk import fail, out, plain_errors, say_json, shares

_NAME = re.compile(r"\w[\w.-]{0,80}", re.ASCII)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(ranker))


def ranker(
    runs: Annotated[list[str], typer.Argument(help="Ids of runs, such as count-1; the newest last.")],
    store: Annotated[
        str, typer.Option("--store", help="The runs' object store, such as s3://bucket/folder.")
    ] = "local",
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the ranker; by default the run's.")
    ] = None,
    archive: ArchiveAlone = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:
    """Train a length ranker from what runs recorded, so that the next run ranks from its first iteration.

    Example: [bold]streamrl ranker count-1 count-2[/bold]
    """
    import dataclasses

    from rich.table import Table

    from flows.run.retrain import retrain

    if name is not None and not _NAME.fullmatch(name):
        fail(f"--name {name}: it becomes part of a key: letters, digits, and - _ . behind the first")
    console = out()
    with shares() as progress:
        result = retrain(runs, store=store, name=name, archive_alone=archive, progress=progress)
    if as_json:
        say_json(dataclasses.asdict(result))
        return
    quality = result.quality
    table = Table(
        "of the longest", "found", min_width=44, title=f"by {quality.groups} groups of problems not seen"
    )
    for share, recall in zip(("20 %", "10 %", "5 %"), quality.recall, strict=True):
        table.add_row(share, f"{recall:.2f}")
    console.print(table)
    console.print(
        f"Kendall's tau {quality.tau:.2f}; error {quality.error:.2f} (log). Trained from {result.groups} "
        f"groups. Start a run with it:\n  --set lengths.start={result.key}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip

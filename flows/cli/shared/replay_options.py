"""The options that commands which read runs have in common."""

from __future__ import annotations

from typing import Annotated

import typer

RunOrStepFile = Annotated[
    str, typer.Argument(help="The run's id, such as count-1, or a step file, such as step.tar.zst.")
]
StepRange = Annotated[
    str | None,
    typer.Option(
        "--step",
        metavar="N|A-B",
        help="Which optimizer step, or the first and last of several; the newest if left out.",
    ),
]
ArchiveAlone = Annotated[
    bool, typer.Option("--archive", help="Read the archive alone; no Kafka broker is asked.")
]
OwnCode = Annotated[
    bool,
    typer.Option(
        "--own-code",
        help="Of a step file: import the loss, learner or reward that it names, from here.",
    ),
]

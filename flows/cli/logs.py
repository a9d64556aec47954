"""streamrl logs"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.shared.talk import fail, out, plain_errors


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(logs))


def logs(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    role: Annotated[
        str | None, typer.Argument(help="trainer, feeder, generator, generator-0 …; all if left out.")
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, help="How many of the last lines of each log.")
    ] = 30,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:
    """Show the last lines of the logs in a run's report folder, if that is on this machine.

    A machine that joined the run keeps the logs of its processes itself; `streamrl join` says where.

    Example: [bold]streamrl logs count-3 trainer -n 100[/bold]
    """
    from flows.run.locations import logs_folder, named_store
    from infra.files.ends import tail
    from infra.runs import find

    folder = logs_folder(find(named_store(store), run))
    found = sorted(file for file in folder.glob("*.log") if role is None or file.stem.startswith(role))
    if not found:
        there = ", ".join(sorted(file.stem for file in folder.glob("*.log"))) or "none"
        fail(f"{folder} has no log of {role or 'any role'}; it has: {there}")
    console = out()
    for file in found:
        console.print(f"[bold]{file.stem}[/bold] [dim]{file}[/dim]", highlight=False, soft_wrap=True)
        console.print(tail(file, lines), markup=False, highlight=False, soft_wrap=True)

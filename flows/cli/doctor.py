"""streamrl doctor"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.shared.talk import FAILED, out, plain_errors


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(doctor))


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also try things out: slower, starts programs.")
    ] = False,
) -> None:
    """Look at this machine: is all there that a run needs? Each finding says how to mend it.

    Example: [bold]streamrl doctor --deep[/bold]
    """
    from infra.stack.doctor import checks

    console, wrong = out(), 0
    for check in checks(deep=deep):
        wrong += not (check.ok or check.optional)
        sign = "[green]✓[/green]" if check.ok else "[yellow]–[/yellow]" if check.optional else "[red]✗[/red]"
        console.print(sign, check.name, f"[dim]{check.found}[/dim]", highlight=False, soft_wrap=True)
        if not check.ok and check.fix:
            console.print("  →", check.fix, markup=False, highlight=False, soft_wrap=True)
    if wrong:
        raise typer.Exit(FAILED)

"""streamrl down"""

from __future__ import annotations

import typer

from flows.cli.shared.talk import out, plain_errors


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(down))


def down() -> None:
    """Stop what [bold]streamrl up[/bold] started. Data stays in .streamrl/.

    Runs that are going on lose their broker: stop them first (Ctrl-C), and resume them later.

    Example: [bold]streamrl down[/bold]
    """
    from infra.stack import local

    console = out()
    ended = local.stop_stack(
        progress=lambda name, text: console.print(f"[dim]{name}[/dim] {text}", highlight=False)
    )
    if not ended:
        console.print("nothing was running")

"""streamrl init"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.shared.talk import fail, out, plain_errors
from infra.code import EXAMPLES


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(init))


def init(
    folder: Annotated[Path, typer.Argument(help="The folder; it is made if it is not there.")] = Path(),
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are messages, for a chat model.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a first run, which works as it is: a run file, a task, and a script that builds a small model.

    Example: [bold]streamrl init three[/bold]
    """
    import shlex

    from rich.markup import escape

    sources = {file.name: file for file in sorted((EXAMPLES / "start").iterdir()) if file.is_file()}
    if chat:
        sources |= {file.name: file for file in sorted((EXAMPLES / "chat").iterdir()) if file.is_file()}
    there = [name for name in sources if (folder / name).exists()]
    if there and not force:
        fail(f"{folder.absolute()} has {', '.join(there)} already: choose another folder, or --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in sources.items():
            (folder / name).write_bytes(source.read_bytes())
    except OSError as error:
        fail(f"{folder.absolute()} can't be written: {error}")
    console, runfile = out(), folder / "run.yaml"
    for name, about in (
        ("run.yaml", "the run file"),
        ("task.py", "problems and reward"),
        ("model.py", "the model"),
    ):
        console.print(escape(str(folder / name)), f" [dim]{about}[/dim]", highlight=False, soft_wrap=True)
    console.print("\nNext:", highlight=False)
    for command, why in (("--check", "look whether it can run"), ("", "train: a few minutes")):
        words = shlex.join(["streamrl", "run", str(runfile), *([command] if command else [])])
        console.print(f"  {escape(words)}  [dim]{why}[/dim]", highlight=False, soft_wrap=True)

"""The page about commands, from the command line itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from flows.cli import app
from flows.cli.shared.talk import EXIT_CODES

_HEAD = """# Commands

`streamrl COMMAND --help` says the same. [When something is wrong](../how-to/when-something-is-wrong.md)
explains messages.

## Exit codes

| code | meaning |
|---|---|
"""
_BOLD = re.compile(r"\[bold\](.*?)\[/bold\]")


def commands_page() -> str:
    """Return the page."""
    root: Any = typer.main.get_command(app)
    codes = "".join(f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES.items())
    return _HEAD + codes + "".join(_sections(root.commands, "streamrl"))


def _sections(commands: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, command in commands.items():
        full = f"{prefix} {name}"
        yield f"\n## {full}\n\n{_told(command.help or '')}\n"
        if inner := getattr(command, "commands", None):
            yield from _sections(inner, full)
            continue
        given = [one for one in command.params if one.name != "help"]
        arguments = [one.name.upper() for one in given if one.param_type_name == "argument"]
        yield f"\n```\n{' '.join([full, '[OPTIONS]', *arguments])}\n```\n"
        if given:
            yield "\n".join(["", "| | default | meaning |", "|---|---|---|", *map(_row, given), ""])


def _row(one: Any) -> str:
    is_argument = one.param_type_name == "argument"
    names = (
        f"`{one.name.upper()}`"
        if is_argument
        else ", ".join(f"`{option}`" for option in (*one.opts, *one.secondary_opts))
    )
    unsaid = one.default in (None, False, True, [], ()) or callable(one.default)
    default = "needed" if one.required else "" if unsaid else f"`{one.default}`"
    return f"| {names} | {default} | {_told(one.help or '')} |".replace("\n", " ")


def _told(text: str) -> str:
    return _BOLD.sub(r"`\1`", text.strip())

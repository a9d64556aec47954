"""Makes values from outside short and printable, so that they can't fill or garble a message."""

from __future__ import annotations

import reprlib

_LONGEST_LINE = 1_200  # characters
_LONGEST = 4_000  # bytes of a whole message

_short = reprlib.Repr()
_short.maxstring, _short.maxother, _short.maxlong = 80, 80, 50
_short.maxlevel, _short.maxdict, _short.maxlist, _short.maxtuple, _short.maxset = 2, 4, 6, 6, 4


def shown(value: object) -> str:
    """Write a value as Python does, a long one with … in the middle."""
    return printable(_short.repr(value).replace("...", "…"), 400)


def printable(text: str, most: int = _LONGEST_LINE) -> str:
    """Cut a text to `most` characters, and escape those that a terminal obeys or can't show."""
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in cut)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


def bounded(message: str) -> str:
    """Shorten the lines of a message, and the whole to 4 KB. Says how many lines are left out."""
    lines = [printable(line) for line in message[: 64 * _LONGEST].splitlines()]
    kept: list[str] = []
    size = 0
    for line in lines:
        size += len(line.encode()) + 1
        if size > _LONGEST - 40 and kept:
            return "\n".join([*kept, f"… and {len(lines) - len(kept)} more lines"])
        kept.append(line if size <= _LONGEST else line.encode()[:_LONGEST].decode(errors="ignore"))
    return "\n".join(kept)

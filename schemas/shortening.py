"""Short and printable: what comes from outside must not fill or garble a message about it."""

from __future__ import annotations

import reprlib

_LONGEST_LINE = 1_200  # characters
_LONGEST = 4_000  # bytes of a whole message

_short = reprlib.Repr()
_short.maxstring, _short.maxother, _short.maxlong = 80, 80, 50
_short.maxlevel, _short.maxdict, _short.maxlist, _short.maxtuple, _short.maxset = 2, 4, 6, 6, 4


def shown(value: object) -> str:
    """A value as Python writes it; long ones with … in the middle."""
    return printable(_short.repr(value).replace("...", "…"), 400)


def printable(text: str, most: int = _LONGEST_LINE) -> str:
    """Text without characters that a terminal obeys or can't show; long text is cut."""
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in cut)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


def bounded(message: str) -> str:
    """A message of several lines, each short, and all of at most 4 KB: what is left out is counted."""
    lines = [printable(line) for line in message[: 64 * _LONGEST].splitlines()]
    kept: list[str] = []
    size = 0
    for line in lines:
        size += len(line.encode()) + 1
        if size > _LONGEST - 40 and kept:
            return "\n".join([*kept, f"… and {len(lines) - len(kept)} more lines"])
        kept.append(line if size <= _LONGEST else line.encode()[:_LONGEST].decode(errors="ignore"))
    return "\n".join(kept)

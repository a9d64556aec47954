"""The last lines of a log."""

from __future__ import annotations

import os
from pathlib import Path


def tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of a log, for an error's text; empty if it can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])

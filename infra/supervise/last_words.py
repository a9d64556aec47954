"""The last words of a process: the error that ended it, in a file beside its log, for whoever started it.

A log holds tracebacks and the lines of libraries; the last words are what a person reads.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from schemas.shortening import bounded

LAST_WORDS_VARIABLE = "STREAMRL_LAST_WORDS"  # the file; set by the team that starts the process
_MOST = 1 << 16  # bytes that are read


def leave_last_words(text: str) -> None:
    """Write the error that ends this process, if somebody wants to know it."""
    if where := os.environ.get(LAST_WORDS_VARIABLE):
        with contextlib.suppress(OSError):  # the log has the error, too
            Path(where).write_text(bounded(text))


def take_last_words(path: Path) -> str:
    """Return the words in a file, and remove it; empty if there is none."""
    try:
        with path.open("rb") as file:
            words = file.read(_MOST).decode(errors="replace")
        path.unlink()
    except OSError:
        return ""
    return bounded(words).strip()

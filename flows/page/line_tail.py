"""Reads a file that gets a line at a time: each read gives only the lines that are new."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

_LONGEST = 4 << 20  # bytes of a line; a longer one is no line of ours, and is passed over in pieces


class LineTail:
    """A file of JSON objects, one a line, that may grow or be replaced between two reads."""

    def __init__(self, path: Path, begin_again: Callable[[], None] = lambda: None) -> None:
        """`begin_again` is called before lines of a new file come: what the old one said is void."""
        self.path, self._begin_again = path, begin_again
        self._position, self._file = 0, 0

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the objects on whole new lines. Other lines are left out; a missing file has none."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            if self._file not in (0, found.st_ino) or found.st_size < self._position:
                self._position = 0
                self._begin_again()
            self._file = found.st_ino
            file.seek(self._position)
            while line := file.readline(_LONGEST):
                if not line.endswith(b"\n") and len(line) < _LONGEST:
                    return  # it is being written
                self._position += len(line)
                with contextlib.suppress(ValueError, RecursionError):
                    if isinstance(row := _read(line), dict):
                        yield row


def _read(line: bytes) -> object:
    try:
        return msgspec.json.decode(line)
    except ValueError:  # NaN is no JSON, and stands in our files
        return json.loads(line)

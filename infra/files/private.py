"""Folders that only their owner may look into: a run's files are private."""

from __future__ import annotations

from pathlib import Path

_OTHERS = 0o077


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents for this user alone. Existing folders stay as they are."""
    missing = []
    while not folder.exists() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    if missing and not missing[0].is_dir():
        missing[0].mkdir()  # raises the error that says what is in the way


def open_to_others(folder: Path) -> bool:
    """Return whether other users of this machine may list, read or change something in a folder."""
    return bool(folder.stat().st_mode & _OTHERS)

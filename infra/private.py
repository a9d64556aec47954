"""Folders that only their owner may look into: what a run keeps is nobody else's business."""

from __future__ import annotations

from pathlib import Path

_OTHERS = 0o077


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone; what is there stays."""
    missing = []
    while not folder.exists() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    if missing and not missing[0].is_dir():
        missing[0].mkdir()  # says what is in the way


def open_to_others(folder: Path) -> bool:
    """Whether other users of this machine may list, read or change something in it."""
    return bool(folder.stat().st_mode & _OTHERS)

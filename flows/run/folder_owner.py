"""Keeps the files of two runs apart that have one id, and so one report folder.

runs/count-1/identity      the identity of the run whose files these are
runs/count-1.before-1/     the files of a run that had this id before, and was removed without its report
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from flows.run.request import RunFailed
from infra.files.locks import locked
from infra.files.private import make_private
from infra.files.writing import write_whole
from infra.runs import RunRecord

IDENTITY_FILE = "identity"
_LOCK = ".lock"  # whoever calls holds it: moved away, it would lock nothing any more


def lock_of_run(run: str, folder: Path, deadline_s: float) -> AbstractContextManager[int]:
    """Lock a run by its report folder: one start of it goes on at a time. Gives the lock's descriptor."""
    return locked(folder / _LOCK, what=f"run {run}", deadline_s=deadline_s)


def take_report_folder(record: RunRecord, folder: Path, *, new: bool, say: Callable[[str], None]) -> None:
    """Note in a report folder whose it is, and move files of another run that had the id into a sibling.

    A folder that names no run, as those of older releases, is another run's only if this one is `new`, or a
    fork that was made after all of the files: its first start is a resume. The caller holds the run's lock,
    and nothing in the folder is open. Raises RunFailed if files can't be moved.
    """
    if not record.identity:  # a run of an older release can't be told from others
        return
    try:
        held = _identity(folder)
        if held == record.identity:
            return
        others = [entry for entry in folder.iterdir() if entry.name != _LOCK]
        newest = max((entry.lstat().st_mtime for entry in others), default=0.0)
        if others and (held or new or (record.fork is not None and newest < record.created_at)):
            aside = _free_sibling(folder)
            make_private(aside)
            # The identity is last: a move that is cut off is then taken up by the next start.
            for entry in sorted(others, key=lambda entry: entry.name == IDENTITY_FILE):
                shutil.move(entry, aside / entry.name)
            say(f"{folder} held the files of an earlier run {record.id}: they are in {aside} now")
        write_whole(folder / IDENTITY_FILE, f"{record.identity}\n")
    except OSError as error:
        raise RunFailed(
            f"run {record.id} can't have {folder} for itself: {error}\n"
            "  → make room there, or make it writable for you"
        ) from error


def _identity(folder: Path) -> str:
    """Return the identity of the run whose folder this is; empty if the folder names none."""
    try:
        return (folder / IDENTITY_FILE).read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _free_sibling(folder: Path) -> Path:
    number = 1
    while (sibling := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    return sibling

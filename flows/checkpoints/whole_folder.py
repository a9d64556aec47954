"""Writes a folder that is there whole or not at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.checkpoints.version_source import ExportError


def check_new(target: Path) -> None:
    """Raise ExportError unless a folder is new or empty."""
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise ExportError(f"{target} is there and not empty: name another folder, or remove it")


@contextmanager
def whole_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a folder beside the target. At the end it takes the target's place; on errors it is removed."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
        work.mkdir()
    except OSError as error:
        raise ExportError(f"{target} can't be written: {error}") from error
    try:
        yield work
        if target.is_dir():
            shutil.rmtree(target) if replace else target.rmdir()  # rmdir refuses a folder that is not empty
        work.replace(target)
    except OSError as error:
        raise ExportError(f"{target} can't be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)

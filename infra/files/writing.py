"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from infra.files.private import make_private


def write_whole(path: Path, text: str | bytes, *, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old text or the new one, even if the writer is killed."""
    make_private(path.parent)
    # mkstemp makes it 0600: a secret is never readable by others, not even for a moment.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

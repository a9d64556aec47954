"""Remembers the newest version of a series that was verified on this machine. Older ones must be asked for.

<home>/verified/<name of the series, hashed>.json

Otherwise anybody who can delete the newest manifests of a store could lead all readers back to an older
version: its signature stays valid.
"""

from __future__ import annotations

import json
import logging
import uuid
from pathlib import Path

from blake3 import blake3

from infra.stack.paths import StackPaths
from infra.weights.weights_error import WeightsError

_LARGEST = 1 << 12  # bytes

_log = logging.getLogger("streamrl.weights")


class Seen:
    """The newest version that was verified of one series: of a run, or of the versions at a URL."""

    def __init__(self, series: str) -> None:
        self._series = series
        name = blake3(series.encode()).hexdigest(16)
        self.file: Path = StackPaths.locate().home / "verified" / f"{name}.json"

    @property
    def version(self) -> int:
        """The newest version that was verified; -1 if there is none yet."""
        try:
            with self.file.open("rb") as opened:
                said = json.loads(opened.read(_LARGEST))
            return int(said["version"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return -1

    def remember(self, version: int, *, lower: bool = False) -> None:
        """Remember that a version was verified; if it is older than the one before, only with `lower`."""
        if version == self.version or (version < self.version and not lower):
            return
        work = self.file.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            work.write_text(json.dumps({"of": self._series, "version": version}))
            work.replace(self.file)
        except OSError as error:  # the version is verified all the same
            work.unlink(missing_ok=True)
            _log.warning("this machine can't remember that version %d was verified: %s", version, error)

    def check(self, version: int, where: str, what_to_do: str) -> None:
        """Raise WeightsError if a version is older than the one that is remembered."""
        if version < (before := self.version):
            raise WeightsError(
                f"{where} has version {version} as its newest, and version {before} was verified on this "
                f"machine: newer ones are missing there, or it is another store. {what_to_do}"
            )

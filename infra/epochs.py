"""Numbers the starts of a process of which a run may have one at a time: the newest start fences all others.

runs/<run>/trainers/e07.json     start 7 of the trainer: when, where and as which process

A process that was thought dead and finds a newer start must stop writing. Only the newest 8 markers are kept,
so looking for a newer start is one short listing, however often a run was started.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass

from infra.errors import Explained
from infra.runs import host_name
from infra.stores.store import Exists, Store, StoreError

_KEPT = 8
_LARGEST = 4096  # bytes that are read of what a start says of itself


class Replaced(Explained):
    """This start must not write any more: a newer one has replaced it, or its marker is gone."""


@dataclass(frozen=True)
class Epoch:
    """A start of a process, with its number."""

    store: Store
    folder: str  # where the markers are
    role: str
    number: int

    def check(self) -> None:
        """Raise Replaced if there is a newer start or this one's marker is gone. Ignore store errors."""
        try:
            newest = max(_numbers(self.store, self.folder), default=-1)
        except StoreError:
            return  # whoever writes to it next meets the same error
        if newest > self.number:
            raise Replaced(
                f"start {newest} of the {self.role}{self._about(newest)} has replaced this one (start "
                f"{self.number}), which was thought dead. This one ends, and the newer one goes on"
            )
        if newest < self.number:
            raise Replaced(
                f"{self.store.url}/{_key(self.folder, self.number)} is gone: the store is another one than "
                f"at start {self.number} of the {self.role}, or it was emptied: look at placement.store, and "
                "at what is mounted"
            )

    def _about(self, number: int) -> str:
        try:
            said = json.loads(self.store.get(_key(self.folder, number), _LARGEST))
            return f" (process {int(said['pid'])} on {str(said['host'])[:64]})"
        except (StoreError, ValueError, KeyError, TypeError):
            return ""


def begin(store: Store, run: str, role: str) -> Epoch:
    """Register a start of a role under a number of its own, even if two begin at the same moment."""
    folder = f"runs/{run}/{role}s"
    known = _numbers(store, folder)
    number = max(known, default=-1) + 1
    said = json.dumps({"at": time.time(), "host": host_name(), "pid": os.getpid()}).encode()
    while True:
        try:
            store.put_new(_key(folder, number), said)
            break
        except Exists:
            number += 1
    for old in sorted(known)[: 1 - _KEPT]:
        store.delete(_key(folder, old))
    return Epoch(store, folder, role, number)


def _numbers(store: Store, folder: str) -> list[int]:
    """Return the numbers of the starts whose markers are kept."""
    pattern = re.compile(rf"{re.escape(folder)}/e(\d{{1,9}})\.json")
    return [int(found[1]) for key in store.list(folder) if (found := pattern.fullmatch(key))]


def _key(folder: str, number: int) -> str:
    return f"{folder}/e{number:02d}.json"

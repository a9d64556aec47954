"""Announced versions, of which the newest one that can be had is taken.

Anybody who may write to the topic can announce any version. A version that is not in the store, or differs
there from the announcement, is set aside and tried again later; meanwhile the next newest one is taken. Only
the 64 versions that were heard last are remembered. A flood of false ones passes, since the trainer announces
one in each iteration.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_Item = TypeVar("_Item")

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_REMEMBERED = 64


@dataclass
class _Entry(Generic[_Item]):
    item: _Item
    heard: int
    failures: int = 0
    not_before: float = 0.0  # monotonic


class Candidates(Generic[_Item]):
    """Announced versions, by version and root. Other threads may only ask which ones are set aside."""

    def __init__(self, pauses: Sequence[float] = PAUSES_S) -> None:
        self._pauses, self._numbers = pauses, itertools.count()
        self._entries: dict[tuple[int, str], _Entry[_Item]] = {}

    def add(self, version: int, root: str, item: _Item) -> None:
        """Add an announced version. One that failed before stays set aside for its time."""
        heard, known = next(self._numbers), self._entries.pop((version, root), None)
        entry = _Entry(item, heard)
        if known is not None:
            entry.failures, entry.not_before = known.failures, known.not_before
        self._entries[version, root] = entry
        for key in list(self._entries)[:-_REMEMBERED]:
            del self._entries[key]

    def newest(self, above: int, may: Callable[[int], bool] = lambda version: True) -> _Item | None:
        """Return the newest version above `above` that `may` be taken and is not set aside, or None.

        If two have the same number, return the one that was heard last.
        """
        now = time.monotonic()
        open_ = [
            (version, entry.heard, entry) for (version, _), entry in self._entries.items()
            if version > above and now >= entry.not_before and may(version)
        ]  # fmt: skip
        return max(open_, key=lambda one: one[:2])[2].item if open_ else None

    def failed(self, version: int, root: str) -> int:
        """Set a version aside because it can't be had. Return how often it has failed by now."""
        entry = self._entries.get((version, root))
        if entry is None:
            return 1
        entry.not_before = time.monotonic() + self._pauses[min(entry.failures, len(self._pauses) - 1)]
        entry.failures += 1
        return entry.failures

    def aside(self, above: int) -> list[int]:
        """Return the versions above `above` of which each announced root has failed, in ascending order."""
        entries = dict(self._entries)  # the thread that asks may be another one
        found = {version for (version, _), entry in entries.items() if entry.failures}
        good = {version for (version, _), entry in entries.items() if not entry.failures}
        return sorted(version for version in found - good if version > above)

"""Versions that were announced, of which the newest that can be had is taken.

Anybody who may write to the topic may announce any version. One that is not in the store, or is another one
there than was announced, is set aside and tried again later; meanwhile the next newest is taken. Those that
were heard last are remembered: the trainer announces each iteration, so that a flood of others passes.
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
    """By version and root; not for several threads."""

    def __init__(self, pauses: Sequence[float] = PAUSES_S) -> None:
        self._pauses, self._numbers = pauses, itertools.count()
        self._entries: dict[tuple[int, str], _Entry[_Item]] = {}

    def add(self, version: int, root: str, item: _Item) -> None:
        """One was announced. Said again it is no more likely to be there, and waits for its time."""
        heard, known = next(self._numbers), self._entries.pop((version, root), None)
        entry = _Entry(item, heard)
        if known is not None:
            entry.failures, entry.not_before = known.failures, known.not_before
        self._entries[version, root] = entry
        for key in list(self._entries)[:-_REMEMBERED]:
            del self._entries[key]

    def newest(self, above: int, may: Callable[[int], bool] = lambda version: True) -> _Item | None:
        """The newest above a version that may be taken and is not set aside; of two, the one heard last."""
        now = time.monotonic()
        open_ = [
            (version, entry.heard, entry) for (version, _), entry in self._entries.items()
            if version > above and now >= entry.not_before and may(version)
        ]  # fmt: skip
        return max(open_, key=lambda one: one[:2])[2].item if open_ else None

    def failed(self, version: int, root: str) -> int:
        """One can't be had; how often that is so by now."""
        entry = self._entries.get((version, root))
        if entry is None:
            return 1
        entry.not_before = time.monotonic() + self._pauses[min(entry.failures, len(self._pauses) - 1)]
        entry.failures += 1
        return entry.failures

    def aside(self, above: int) -> list[int]:
        """The newest versions above one that could not be had the last time, in order."""
        found = {version for (version, _), entry in self._entries.items() if entry.failures}
        good = {version for (version, _), entry in self._entries.items() if not entry.failures}
        return sorted(version for version in found - good if version > above)

"""A bounded, evenly spaced choice of a stream of things whose end nobody knows."""

from __future__ import annotations

from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class EveryNth(Generic[Thing]):
    """Keeps every `step`-th thing, at most `most`: if there are more, every other one is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Drop all."""
        self.kept: list[Thing] = []
        self.step = 1
        self._seen = 0

    def add(self, thing: Thing) -> None:
        """Note one more thing."""
        if self._seen % self.step == 0:
            self.kept.append(thing)
            if len(self.kept) > self._most:
                self.kept = self.kept[::2]
                self.step *= 2
        self._seen += 1

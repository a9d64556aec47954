"""Waits for the tokens that a leaving generator hands over, so that others go on with them.

generator ── parts of all that it has begun ──► <run>.parts ─────┐
          ── "I leave, and have handed over so many" ──► reports ┴─► its jobs wait again, each with its part

Reports and parts are two topics, which are read side by side: either may be here first. After a while the
generator counts as gone with whatever parts have come; samples without one are begun anew. Parts of a
generator that stays are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from schemas.identity import SampleKey
from schemas.messages import GeneratorReport, Part

_KEPT_S = 60.0  # how long the parts of a generator wait for its report
_MOST = 65_536  # parts that are kept for generators which may be about to leave

HandedPart = tuple[Part, int]  # and its offset on `<run>.parts`


@dataclass(frozen=True)
class _Leaver:
    report: GeneratorReport
    until: float


class Leaving:
    """The generators that leave, and the parts that belong to no move."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._leavers: dict[str, _Leaver] = {}
        self._parts: dict[str, dict[SampleKey, HandedPart]] = {}
        self._came: dict[str, float] = {}  # when the newest part of each came
        self._count = 0

    def reported(self, report: GeneratorReport, now: float) -> None:
        """Take a generator's last report."""
        self._leavers.setdefault(report.generator, _Leaver(report, now + self._patience_s))

    def arrived(self, part: Part, at: int, now: float) -> None:
        """Take a part that belongs to no move, at its offset on `<run>.parts`."""
        if self._count < _MOST:
            self._parts.setdefault(part.generator, {})[part.group, part.index] = part, at
            self._came[part.generator] = now
            self._count += 1

    def gone(self, now: float) -> list[tuple[GeneratorReport, dict[SampleKey, HandedPart]]]:
        """Return those whose parts are all here, or were waited for long enough, with their parts."""
        ready = [
            name for name, one in self._leavers.items()
            if len(self._parts.get(name, ())) >= one.report.handed or now >= one.until
        ]  # fmt: skip
        return [(self._leavers.pop(name).report, self._parts_of(name)) for name in ready]

    def keep(self, is_known: Callable[[str], bool], now: float) -> None:
        """Drop the parts of generators that are not there any more, or that stay."""
        for name in [
            name for name in self._parts
            if not is_known(name) or (name not in self._leavers and now >= self._came[name] + _KEPT_S)
        ]:  # fmt: skip
            self._parts_of(name)

    def _parts_of(self, name: str) -> dict[SampleKey, HandedPart]:
        found = self._parts.pop(name, {})
        self._came.pop(name, None)
        self._count = sum(map(len, self._parts.values()))
        return found

"""Follows samples that move from one generator to another, with their tokens so far.

dispatcher ── "hand it over" ──► source ── part ──► <run>.parts ──► dispatcher ── job and part ──► target

A source that had not begun the sample gives it back, and the target begins it. If the source is gone or does
not answer, the target begins the sample anew: then only time is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from producers.dispatch.jobs import SampleJob
from schemas.identity import SampleKey
from schemas.messages import Part

GeneratorStart = tuple[str, str]  # name and start of a generator


@dataclass(frozen=True)
class _Move:
    job: SampleJob
    source: GeneratorStart
    target: GeneratorStart
    began_at: float


class Moves:
    """The moves that have not arrived."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._moves: dict[SampleKey, _Move] = {}

    def begin(self, job: SampleJob, source: GeneratorStart, target: GeneratorStart, now: float) -> None:
        """Note that a sample is to move."""
        self._moves[job.key] = _Move(job, source, target, now)

    def arrived(self, part: Part, at: int = -1) -> tuple[GeneratorStart, SampleJob] | None:
        """Note that a sample's part is at offset `at` of `<run>.parts`.

        Return the target and the job with its part; None if no such move is under way.
        """
        move = self._moves.get((part.group, part.index))
        if move is None or move.source[0] != part.generator:
            return None
        del self._moves[part.group, part.index]
        return move.target, replace(move.job, part=part, part_at=at)

    def returned(self, key: SampleKey, source: GeneratorStart) -> None:
        """Note that the source had not begun a sample, and has it no more."""
        move = self._moves.get(key)
        if move is not None and move.source == source:
            self._moves[key] = replace(move, began_at=float("-inf"))  # so it counts as lost

    def finished(self, key: SampleKey) -> None:
        """Drop a sample's move: the sample is finished."""
        self._moves.pop(key, None)

    def lost(
        self, is_there: Callable[[GeneratorStart], bool], now: float
    ) -> list[tuple[GeneratorStart, SampleJob]]:
        """Remove moves whose source is gone or silent for too long.

        Return their targets and jobs, to begin anew.
        """
        gone = {
            key: move
            for key, move in self._moves.items()
            if not is_there(move.source) or now - move.began_at > self._patience_s
        }
        for key in gone:
            del self._moves[key]
        return [(move.target, move.job) for move in gone.values()]

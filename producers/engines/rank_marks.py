"""How far each rank of an engine is, in memory that ranks share: so a standstill can be told apart.

A rank marks each act when it begins it and when it is done. Ranks wait for each other within steps; so one
that has not begun what others have begun is the one that they wait for.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_BYTES = 4096


class RankMarks:
    """Two counts for each rank: of acts begun, and of acts done."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: of those that another rank made."""
        if path is None:
            self._file = os.memfd_create("marks")
            os.ftruncate(self._file, _BYTES)
        else:
            self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        self._marks = np.frombuffer(mmap.mmap(self._file, _BYTES), np.int64).reshape(-1, 2)

    @property
    def path(self) -> Path:
        """The path by which other processes open them, as long as this object lives."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def begin(self, rank: int) -> None:
        """Mark that a rank begins an act."""
        self._marks[rank, 0] += 1

    def end(self, rank: int) -> None:
        """Mark that a rank is done with it."""
        self._marks[rank, 1] = self._marks[rank, 0]

    def of(self, ranks: Iterable[int]) -> list[tuple[int, int, int]]:
        """Return ranks with their counts, for a machine that can't see this memory."""
        return [(rank, *map(int, self._marks[rank])) for rank in ranks]  # type: ignore[misc]

    def set(self, marks: Iterable[tuple[int, int, int]]) -> None:
        """Take over the counts of ranks of another machine."""
        for rank, begun, done in marks:
            self._marks[rank] = begun, done

    def behind(self, ranks: int) -> list[int]:
        """Return the ranks that all others wait for, as far as the marks tell; empty if none is behind."""
        begun = self._marks[:ranks, 0]
        done = self._marks[:ranks, 1]
        late = np.flatnonzero(begun < begun.max())
        return (late if late.size else np.flatnonzero(done < done.max())).tolist()

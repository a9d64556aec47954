"""Sample-level work: what the reference, the critic and earlier weights say, as soon as a sample is there.

A long sample is scored by itself, as it comes; the short ones of a group are scored together, when the group
is whole. Which are together never depends on timing, so scores have the same bits whenever that is: ahead,
while the trainer would wait, or when it is trained, or when the ledger's steps are taken again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from consumers.batches.training_rows import Scores, TrainingRow, groups_of
from consumers.learners.learner import Learner
from consumers.losses.loss import Needs
from schemas.identity import SampleKey

_LONG = 512  # tokens, from which on a forward pass over one sample is no waste


class Scoring:
    """Scores of the samples of one step."""

    def __init__(self, learner: Learner, needs: Needs, *, at_once: int) -> None:
        self._learner, self._needs, self._at_once = learner, needs, at_once
        self._done: dict[SampleKey, Scores] = {}

    def begin(self) -> None:
        """A step begins: what was scored for the one before is of no use."""
        self._done.clear()

    def missing(self, groups: Iterable[Sequence[TrainingRow]]) -> list[Sequence[TrainingRow]]:
        """What can be scored of groups as far as they are here, and is not: as much as there are ranks."""
        parts = (part for rows in groups for part in self._missing(rows)) if self._needs.any else ()
        return list(itertools.islice(parts, self._at_once))

    def scored(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """The rows of whole groups, with their scores."""
        if not self._needs.any:
            return list(rows)
        self.score([p for members in groups_of(rows) for p in self._missing([rows[n] for n in members])])
        return [replace(row, scores=self._done[_key(row)]) for row in rows]

    def _missing(self, rows: Sequence[TrainingRow]) -> Iterator[Sequence[TrainingRow]]:
        """What is to be scored together of a group as far as it is here, by index."""
        for row in rows:
            if row.size >= _LONG and _key(row) not in self._done:
                yield [row]
        short = sorted((row for row in rows if row.size < _LONG), key=lambda row: row.size)
        if len(rows) == rows[0].sample.size and short and _key(short[0]) not in self._done:
            yield short

    def score(self, parts: Sequence[Sequence[TrainingRow]]) -> None:
        """Each part by itself."""
        for rows in self._learner.score(parts, self._needs) if parts else ():
            self._done.update((_key(row), row.scores) for row in rows)


def _key(row: TrainingRow) -> SampleKey:
    return row.sample.group, row.sample.index

"""Score samples by the reference, the critic and earlier weights as soon as they are there.

A long sample is scored by itself when it comes; the short samples of a group are scored together when the
group is complete, or in parts if they are many. Timing never decides which samples are scored together. So
scores have the same bits whether they are made ahead, while the trainer would wait, at training, or when a
step is taken again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from consumers.batches.training_rows import Scores, TrainingRow, groups_of
from consumers.learners.learner import Learner
from consumers.losses.loss import Needs

_Key = tuple[int, int, int, int]  # group, index, and the place in the log
_LONG = 512  # tokens from which on a sample is worth a forward pass of its own
_MOST = 1 << 14  # tokens of short samples in a forward pass: a group may have thousands of samples


class Scoring:
    """Makes and keeps the scores of the samples of one step."""

    def __init__(self, learner: Learner, needs: Needs, *, at_once: int) -> None:
        self._learner, self._needs, self._at_once = learner, needs, at_once
        self._done: dict[_Key, Scores] = {}

    def begin(self) -> None:
        """Begin a step: forget the scores of the step before."""
        self._done.clear()

    def missing(self, groups: Iterable[Sequence[TrainingRow]]) -> list[Sequence[TrainingRow]]:
        """Return parts of these groups that can be scored now and are not yet: at most `at_once`."""
        parts = (part for rows in groups for part in self._missing(rows)) if self._needs.any else ()
        return list(itertools.islice(parts, self._at_once))

    def scored(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Return the rows of whole groups with their scores; make the scores that are missing."""
        if not self._needs.any:
            return list(rows)
        self.score([p for members in groups_of(rows) for p in self._missing([rows[n] for n in members])])
        return [replace(row, scores=self._done[_key(row)]) for row in rows]

    def _missing(self, rows: Sequence[TrainingRow]) -> Iterator[Sequence[TrainingRow]]:
        """Yield the rows of one group, by index, in parts that can be scored now and are not yet."""
        for row in rows:
            if row.size >= _LONG and _key(row) not in self._done:
                yield [row]
        if len(rows) == rows[0].sample.size:
            short = sorted((row for row in rows if row.size < _LONG), key=lambda row: row.size)
            yield from (part for part in _parts(short) if _key(part[0]) not in self._done)

    def score(self, parts: Sequence[Sequence[TrainingRow]]) -> None:
        """Score each part by itself."""
        for rows in self._learner.score(parts, self._needs) if parts else ():
            self._done.update((_key(row), row.scores) for row in rows)


def _parts(rows: Sequence[TrainingRow]) -> Iterator[Sequence[TrainingRow]]:
    """Yield rows in parts of at most `_MOST` tokens each."""
    begin = tokens = 0
    for number, row in enumerate(rows):
        if tokens + row.size > _MOST:
            yield rows[begin:number]
            begin, tokens = number, 0
        tokens += row.size
    if rows:
        yield rows[begin:]


def _key(row: TrainingRow) -> _Key:
    """Tell a sample from one that came in its place: of two that contradict each other, none is kept."""
    return row.sample.group, row.sample.index, row.partition, row.offset

"""Sample-level work: what the reference, the critic and earlier weights say, as soon as a group is there.

A group is scored by itself, so its scores have the same bits whenever that is: ahead, while the trainer would
wait, or when it is trained, or when the ledger's steps are taken again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from consumers.learner import Learner
from consumers.losses.base import Needs
from consumers.rows import Row, groups_of


class Scoring:
    """Scores of the groups of one step."""

    def __init__(self, learner: Learner, needs: Needs, *, at_once: int) -> None:
        self._learner, self._needs, self._at_once = learner, needs, at_once
        self._done: dict[int, list[Row]] = {}  # by group, in the order of its samples

    def begin(self) -> None:
        """A step begins: what was scored for the one before is of no use."""
        self._done.clear()

    def ahead(self, groups: Iterable[Sequence[Row]]) -> bool:
        """Score whole groups that are not yet, one for each rank; False if there is none."""
        if not self._needs.any:
            return False
        missing = (rows for rows in groups if rows[0].sample.group not in self._done)
        chosen = list(itertools.islice(missing, self._at_once))
        self._score(chosen)
        return bool(chosen)

    def scored(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of whole groups, with their scores."""
        if not self._needs.any:
            return list(rows)
        groups = groups_of(rows)
        self._score(
            [
                [rows[number] for number in members]
                for members in groups
                if rows[members[0]].sample.group not in self._done
            ]
        )
        result = list(rows)
        for members in groups:
            done = self._done[rows[members[0]].sample.group]
            for number, row in zip(members, done, strict=True):
                result[number] = row
        return result

    def _score(self, groups: Sequence[Sequence[Row]]) -> None:
        if groups:
            for rows in self._learner.score(groups, self._needs):
                self._done[rows[0].sample.group] = rows

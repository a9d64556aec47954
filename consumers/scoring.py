"""Sample-level work: what the reference, the critic and earlier weights say, as soon as a group is there.

A group is scored by itself, so its scores have the same bits whenever that is: ahead, while the trainer would
wait, or when it is trained, or when the ledger's steps are taken again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from consumers.learner import Learner
from consumers.losses.base import Needs
from consumers.rows import Row, groups_of


class Scoring:
    """Scores of the groups of one step."""

    def __init__(self, learner: Learner, needs: Needs) -> None:
        self._learner, self._needs = learner, needs
        self._done: dict[int, list[Row]] = {}  # by group, in the order of its samples

    def begin(self) -> None:
        """A step begins: what was scored for the one before is of no use."""
        self._done.clear()

    def ahead(self, groups: Iterable[Sequence[Row]]) -> bool:
        """Score the first whole group that is not yet; False if there is none."""
        if not self._needs.any:
            return False
        for rows in groups:
            if rows[0].sample.group not in self._done:
                self._score(rows)
                return True
        return False

    def scored(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of whole groups, with their scores."""
        if not self._needs.any:
            return list(rows)
        result = list(rows)
        for members in groups_of(rows):
            group = rows[members[0]].sample.group
            if group not in self._done:
                self._score([rows[number] for number in members])
            for number, row in zip(members, self._done[group], strict=True):
                result[number] = row
        return result

    def _score(self, rows: Sequence[Row]) -> None:
        self._done[rows[0].sample.group] = self._learner.score(rows, self._needs)

"""A step that can't be taken stops the run; a record of its samples is kept so that it can be looked at.

runs/<run>/failed/step-000012-e01.msgpack    the ledger record that the step would have had
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from consumers.batches.training_rows import TrainingRow
from infra.errors import Explained
from infra.stores.store import Store
from schemas.messages import StepRecord
from schemas.wire import Unreadable, decode, encode

_NAMED = 8  # samples in a message


class TrainingFailed(Explained):
    """A step that can't be taken; the message names the step, its samples and how to look at it."""

    lasting = True


class NoFailedStep(Explained):
    """The store has no record of the failed step that somebody asks for."""


@dataclass(frozen=True)
class FailedSteps:
    """The records of a run's failed steps, in the store."""

    store: Store
    run: str

    def keep(self, record: StepRecord) -> None:
        """Keep the record of a failed step: its samples in the order of training, as far as it came."""
        self.store.put(self._key(record.step, record.trainer_epoch), encode(record))

    def find(self, step: int | None = None) -> StepRecord:
        """Return the record of the newest failed step, or of the newest failure of `step`."""
        pattern = re.compile(rf"{re.escape(self._prefix)}/step-(\d+)-e(\d+)\.msgpack")
        found = [match for key in self.store.list(self._prefix) if (match := pattern.fullmatch(key))]
        chosen = [match for match in found if step is None or int(match[1]) == step]
        if not chosen:
            there = ", ".join(sorted({str(int(match[1])) for match in found})) or "none"
            wanted = "a failed step" if step is None else f"a failure of step {step}"
            raise NoFailedStep(
                f"{self.store.url} has no record of {wanted} of run {self.run}; failed steps: {there}"
            )
        newest = max(chosen, key=lambda match: (int(match[2]), int(match[1])))
        try:
            return decode(self.store.get(newest[0]), StepRecord)
        except Unreadable as error:
            raise TrainingFailed(f"{self.store.url}/{newest[0]}: {error}") from error

    @property
    def _prefix(self) -> str:
        return f"runs/{self.run}/failed"

    def _key(self, step: int, trainer_epoch: int) -> str:
        return f"{self._prefix}/step-{step:06d}-e{trainer_epoch:02d}.msgpack"


def named(rows: Sequence[TrainingRow]) -> str:
    """Return the ids of some samples, for people."""
    names = ", ".join(row.sample.id for row in rows[:_NAMED])
    return f"{names} and {len(rows) - _NAMED} more" if len(rows) > _NAMED else names

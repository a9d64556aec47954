"""The interface of a tracker, and its settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from flows.view.metric_rows import MetricRow
from schemas.runspec import RunSpec
from schemas.tracking import TrackerSection


@dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked."""

    id: str
    spec: RunSpec
    folder: Path  # the run's report folder, for files of the tracker
    identity: str = ""  # drawn when the run was made; a run that was removed may have had the same id
    last_step: int = -1  # the newest step that the tracker took before this start

    @property
    def key(self) -> str:
        """The run's id with the start of its identity, where runs of other machines may have the same id."""
        return f"{self.id}-{self.identity[:8]}" if self.identity else self.id


class Tracker(Protocol):
    """Takes the metrics of a run."""

    def step(self, row: MetricRow) -> None:
        """Take the metrics of one optimizer step: a line of metrics.jsonl.

        Steps come in order. After a kill the last ones may come again: `row["step"]` tells.
        """

    def close(self) -> None:
        """End the tracker: the run has ended, or it is interrupted."""


@runtime_checkable
class EvaluationTracker(Tracker, Protocol):
    """A tracker that takes evaluations, too."""

    def evaluation(self, row: MetricRow) -> None:
        """Take the evaluation of one version of the weights. Versions come in order, as steps do."""


@runtime_checkable
class RecallingTracker(Tracker, Protocol):
    """A tracker that can ask its own store which step it has, such as one that writes with a delay."""

    def newest_step(self) -> int | None:
        """Return the newest step that the store has; None if it can't tell. Later ones are given again."""


class TrackerSettings(TrackerSection, ABC):
    """The settings of a tracker. A file that adds a tracker extends this class."""

    @abstractmethod
    def make(self, run: TrackedRun) -> Tracker:
        """Return the tracker of a run, which may have been tracked before."""

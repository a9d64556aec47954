"""The interface of a tracker, and its settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flows.view.metric_rows import MetricRow
from schemas.runspec import RunSpec
from schemas.tracking import TrackerSection


@dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked."""

    id: str
    spec: RunSpec
    folder: Path  # the run's report folder, for files of the tracker


class Tracker(Protocol):
    """Takes the metrics of a run."""

    def step(self, row: MetricRow) -> None:
        """Take the metrics of one optimizer step: a line of metrics.jsonl.

        Steps come in order. After a kill the last ones may come again: `row["step"]` tells.
        """

    def close(self) -> None:
        """End the tracker: the run has ended, or it is interrupted."""


class TrackerSettings(TrackerSection, ABC):
    """The settings of a tracker. A file that adds a tracker extends this class."""

    @abstractmethod
    def make(self, run: TrackedRun) -> Tracker:
        """Return the tracker of a run, which may have been tracked before."""

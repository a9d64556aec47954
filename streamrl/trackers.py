"""For a tracker of your own: see docs/extending/tracker.md."""

from __future__ import annotations

from flows.trackers.tracker import EvaluationTracker, RecallingTracker, TrackedRun, Tracker, TrackerSettings
from flows.view.metric_rows import MetricRow

__all__ = [
    "EvaluationTracker",
    "MetricRow",
    "RecallingTracker",
    "TrackedRun",
    "Tracker",
    "TrackerSettings",
]

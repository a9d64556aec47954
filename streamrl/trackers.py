"""For a tracker of your own: see docs/extending/tracker.md."""

from __future__ import annotations

from flows.trackers.tracker import TrackedRun, Tracker, TrackerSettings
from flows.view.metric_rows import MetricRow

__all__ = [
    "MetricRow",
    "TrackedRun",
    "Tracker",
    "TrackerSettings",
]

"""The tracker `tensorboard`: event files in the folder `tensorboard` of the run's folder.

`tensorboard --logdir runs` shows all runs of a folder. A step that comes again after a kill is the same event
again, with the same time: its point is drawn twice at the same place.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import yaml

from flows.trackers.tracked_values import PackageSettings, curves_of, settings_of
from flows.trackers.tracker import TrackedRun
from flows.view.metric_rows import MetricRow


class TensorboardSettings(PackageSettings):
    """Settings of tensorboard."""

    package: ClassVar[str] = "tensorboard"

    def make(self, run: TrackedRun) -> TensorboardTracker:
        files = self.imported_package(".summary.writer.event_file_writer")
        events = self.imported_package(".compat.proto.event_pb2")
        summaries = self.imported_package(".compat.proto.summary_pb2")
        tracker = TensorboardTracker(
            files.EventFileWriter(str(run.folder / "tensorboard")), events, summaries
        )
        if run.last_step < 0:
            tracker.show_settings(run)
        return tracker


class TensorboardTracker:
    """Writes an event for each step. Needs neither TensorFlow nor torch."""

    def __init__(self, writer: Any, events: Any, summaries: Any) -> None:
        self._writer, self._events, self._summaries = writer, events, summaries

    def show_settings(self, run: TrackedRun) -> None:
        """Write the run's settings as a text."""
        text = yaml.safe_dump(settings_of(run), sort_keys=False)
        value = self._summaries.Summary.Value(tag="run_file/text_summary")
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = 7  # text
        value.tensor.string_val.append("".join(f"    {line}\n" for line in text.splitlines()).encode())
        self._write([value], 0, time.time())

    def step(self, row: MetricRow) -> None:
        self._curves(curves_of(row, "train"), int(row["step"] or 0), row.get("finished_at"))

    def evaluation(self, row: MetricRow) -> None:
        self._curves(curves_of(row, "evaluation"), int(row["version"] or 0), None)

    def _curves(self, values: dict[str, float], step: int, at: float | None) -> None:
        made = [self._summaries.Summary.Value(tag=name, simple_value=one) for name, one in values.items()]
        self._write(made, step, time.time() if at is None else at)
        self._writer.flush()

    def _write(self, values: list[Any], step: int, at: float) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=at, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()

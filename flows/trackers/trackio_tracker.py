"""The tracker `trackio`: a run of Trackio, in its folder on this machine or in a Hugging Face Space."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from flows.trackers.tracked_values import PackageSettings, curves_of, flat_settings
from flows.trackers.tracker import TrackedRun
from flows.view.metric_rows import MetricRow


class TrackioSettings(PackageSettings):
    """Settings of trackio."""

    package: ClassVar[str] = "trackio"

    project: str = Field("streamrl", min_length=1, max_length=128, description="The project of the run.")
    space: str | None = Field(
        None,
        max_length=200,
        description="The Hugging Face Space that gets the metrics, such as me/runs. None: a file of this "
        "machine, in the folder that the variable TRACKIO_DIR names.",
    )

    def make(self, run: TrackedRun) -> TrackioTracker:
        trackio, storage = self.imported_package(), self.imported_package(".sqlite_storage")
        opened = trackio.init(
            self.project, name=run.key, group=run.spec.run, space_id=self.space, config=flat_settings(run),
            resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        steps = run.spec.algorithm.optimizer_steps
        return TrackioTracker(opened, None if self.space else storage.SQLiteStorage, steps)


class TrackioTracker:
    """Logs the metrics of each step. Trackio writes them half a second later, in a thread of its own.

    An evaluation is at the last step of its version, so that no step is behind one that is not written yet.
    """

    def __init__(self, opened: Any, storage: Any, steps: int) -> None:
        self._run, self._storage, self._steps = opened, storage, steps

    def newest_step(self) -> int | None:
        """Return the newest step that is written; -1 if none is, None if a Space has them."""
        if self._storage is None:
            return None
        found = self._storage.get_last_step(self._run.project, self._run.name, self._run.id)
        return -1 if found is None else int(found)

    def step(self, row: MetricRow) -> None:
        self._run.log(curves_of(row, "train"), step=int(row["step"] or 0))

    def evaluation(self, row: MetricRow) -> None:
        step = max(0, int(row["version"] or 0) * self._steps - 1)
        self._run.log(curves_of(row, "evaluation"), step=step)

    def close(self) -> None:
        self._run.finish()

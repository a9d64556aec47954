"""The tracker `wandb`: a run of Weights & Biases, at its server or, offline, in the run's folder.

Curves have an axis of their own, the step or the version: a step that comes again after a kill is drawn at
its own place.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal

from pydantic import Field

from flows.trackers.tracked_values import PackageSettings, Progress, curves_of, settings_of
from flows.trackers.tracker import TrackedRun
from flows.view.metric_rows import MetricRow
from schemas.importing import BadImport


class WandbSettings(PackageSettings):
    """Settings of wandb. The key comes from `wandb login` or the variable WANDB_API_KEY."""

    package: ClassVar[str] = "wandb"

    project: str = Field("streamrl", min_length=1, max_length=128, description="The project of the run.")
    entity: str | None = Field(
        None, max_length=128, description="The team or user that the project belongs to. None: your default."
    )
    tags: list[str] = Field([], max_length=100, description="Tags of the run.")
    mode: Literal["online", "offline"] | None = Field(
        None,
        description="offline: files in the run's folder, which `wandb sync` uploads later. None: as the "
        "variable WANDB_MODE says, else online.",
    )

    def make(self, run: TrackedRun) -> WandbTracker:
        wandb = self.imported_package()
        mode = self.mode or os.environ.get("WANDB_MODE") or "online"
        if mode == "online" and not wandb.api.api_key:
            raise BadImport("wandb has no key: call `wandb login`, set WANDB_API_KEY, or say mode: offline")
        quiet = wandb.Settings(  # nothing is read from this process, its machine or its folder
            console="off", silent=True, x_disable_stats=True, disable_git=True, save_code=False
        )
        opened = wandb.init(
            project=self.project, entity=self.entity, tags=self.tags, mode=mode, id=run.key, name=run.id,
            group=run.spec.run, config=settings_of(run), allow_val_change=True, resume="allow",
            dir=str(run.folder), settings=quiet,
        )  # fmt: skip
        for name, axis in (("train", "train/step"), ("evaluation", "evaluation/version")):
            opened.define_metric(axis, hidden=True)
            opened.define_metric(f"{name}/*", step_metric=axis)
        return WandbTracker(opened, Progress(run))


class WandbTracker:
    """Logs a row of the run's history for each step."""

    def __init__(self, opened: Any, progress: Progress) -> None:
        self._run, self._progress = opened, progress

    def newest_step(self) -> int | None:
        """Return the newest step that the server has; None if there is no server."""
        found = self._run.summary.get("train/step") if self._run.resumed else None
        return int(found) if isinstance(found, int | float) else None

    def step(self, row: MetricRow) -> None:
        self._progress.took(row)
        self._run.log(curves_of(row, "train"))

    def evaluation(self, row: MetricRow) -> None:
        self._run.log(curves_of(row, "evaluation"))

    def close(self) -> None:
        """End the run there. One that was not trained to its end is marked as failed until it goes on."""
        self._run.finish(exit_code=0 if self._progress.is_done else 1)

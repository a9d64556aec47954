"""The tracker `mlflow`: a run of an MLflow server, or of a database beside the runs' folders.

A step that comes again after a kill changes nothing: MLflow keeps one value for a metric, step and time.
"""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

from pydantic import Field

from flows.trackers.tracked_values import PackageSettings, Progress, curves_of, flat_settings
from flows.trackers.tracker import TrackedRun
from flows.view.metric_rows import MetricRow

_TAG = "streamrl.run"
_MOST, _LONGEST_NAME, _LONGEST = 100, 250, 6_000  # settings of a request, and characters of one


class MlflowSettings(PackageSettings):
    """Settings of mlflow."""

    package: ClassVar[str] = "mlflow"

    uri: str | None = Field(
        None,
        max_length=4096,
        description="The MLflow server, or the database for its runs. None: as the variable "
        "MLFLOW_TRACKING_URI says, else the file mlflow.db beside the run's folder.",
    )
    experiment: str = Field(
        "streamrl", min_length=1, max_length=500, description="The experiment of the run."
    )

    def make(self, run: TrackedRun) -> MlflowTracker:
        mlflow, entities = self.imported_package(), self.imported_package(".entities")
        beside = f"sqlite:///{run.folder.parent.absolute()}/mlflow.db"
        client = mlflow.MlflowClient(self.uri or os.environ.get("MLFLOW_TRACKING_URI") or beside)
        return MlflowTracker(client, entities, Progress(run)).open(self.experiment, run)


class MlflowTracker:
    """Logs a batch of metrics for each step. The run there is found again by its tag."""

    def __init__(self, client: Any, entities: Any, progress: Progress) -> None:
        self._client, self._entities, self._progress = client, entities, progress
        self._id = ""

    def open(self, experiment: str, run: TrackedRun) -> MlflowTracker:
        """Make the run in its experiment, or find it there. Return this tracker."""
        client, known = self._client, self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else client.create_experiment(experiment)
        found = client.search_runs([number], f"tags.`{_TAG}` = '{run.key}'", max_results=1)
        opened = found[0] if found else client.create_run(number, run_name=run.id, tags={_TAG: run.key})
        self._id = opened.info.run_id
        client.update_run(self._id, status="RUNNING")
        self._log_settings(flat_settings(run), opened.data.params)
        return self

    def _log_settings(self, said: dict[str, str], known: dict[str, str]) -> None:
        """Log the settings that MLflow has not got. It keeps the first value of each."""
        param = self._entities.Param
        missing = [
            param(name, value[:_LONGEST]) for name, value in said.items()
            if name not in known and len(name) <= _LONGEST_NAME
        ]  # fmt: skip
        for begin in range(0, len(missing), _MOST):
            self._client.log_batch(self._id, params=missing[begin : begin + _MOST])

    def step(self, row: MetricRow) -> None:
        self._log(curves_of(row, "train"), self._progress.took(row), row.get("finished_at"))

    def evaluation(self, row: MetricRow) -> None:
        self._log(curves_of(row, "evaluation"), int(row["version"] or 0), None)

    def _log(self, values: dict[str, float], step: int, at: float | None) -> None:
        moment = int(1000 * (time.time() if at is None else at))
        metrics = [self._entities.Metric(name, value, moment, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """End the run there. One that was not trained to its end counts as killed until it goes on."""
        self._client.set_terminated(self._id, "FINISHED" if self._progress.is_done else "KILLED")

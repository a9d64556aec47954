"""Prefect as the host of a run: phases are tasks, and the flow run's states are orders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, Pause

from flows.balancing.staff import Staff
from flows.flow_runs.called_generators import called_for
from flows.flow_runs.called_ranks import call_for_ranks
from flows.flow_runs.watching import FlowRunWatch
from flows.run.host import Host, HostOrder
from flows.run.request import RunSuspended
from infra.runs import RunRecord
from schemas.runspec import RunSpec

_LONGEST_TAG = 100


class PrefectHost(Host):
    """The flow run that this process runs. Started again, it goes on with the run that it had."""

    def __init__(self, watch: FlowRunWatch) -> None:
        self._watch = watch
        self.flow_run = str(watch.flow_run.id)
        # Prefect counts retries, but no resumption after a pause; it left the tag of the run.
        tagged = any(tag.startswith(run_tag("")) for tag in watch.flow_run.tags)
        self.started_again = tagged or watch.flow_run.run_count > 1
        self.record: RunRecord | None = None
        self.suspension: Pause | None = None  # how a flow ends that is suspended

    def phase(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a phase as a task."""
        # Arguments and results are live objects: Prefect must not hash, store or inspect them.
        name = function.__name__.replace("_", " ")
        as_task = task(function, name=name, cache_policy=NO_CACHE, persist_result=False)

        def call(*args: Any, **options: Any) -> Any:
            try:
                return as_task(*args, **options)
            except Pause as pause:  # Prefect itself has seen that the flow run is suspended
                self.suspension = pause
                raise RunSuspended from None

        return call

    def took_up(self, record: RunRecord) -> None:
        """Name the flow run as the run, and tag it."""
        self.record = record
        self._watch.show_as(record.id, tags_of(record.id, record.spec))

    def order(self) -> HostOrder:
        """Return the order that follows from the flow run's state."""
        return self._watch.order

    def paused(self) -> None:
        """End a suspended flow run here, which frees the machine: Prefect starts it again when it is resumed.

        One without a deployment can't be suspended: its process stays.
        """
        if self._watch.suspended:
            self.suspension = Pause(state=self._watch.state)
            raise RunSuspended

    def call_site(self, record: RunRecord, site: str) -> bool:
        """Start a site's deployment. Returns False if there is none."""
        name = f"sync-weights/{site}"
        parameters = {"run": record.id, "site": site, "store": record.store}
        try:
            run_deployment(name, parameters=parameters, timeout=0)
        except ObjectNotFound:
            get_run_logger().warning("there is no deployment %s", name)
            return False
        get_run_logger().info("deployment %s has been called", name)
        return True

    def call_ranks(self, record: RunRecord, deployment: str, ranks: int) -> bool:
        """Call a deployment that holds ranks elsewhere, unless a flow run of it has not ended."""
        if called := call_for_ranks(record, deployment, ranks):
            get_run_logger().info("deployment %s has been called for %d ranks", deployment, ranks)
        return called

    def generators(self, record: RunRecord) -> Staff | None:
        """Return the generators of the deployment that a run names."""
        return called_for(record, record.spec.placement.balance)


def run_tag(run: str) -> str:
    """Return the tag by which the flow runs of a run are found."""
    return f"run:{run}"


def tags_of(run: str, spec: RunSpec) -> list[str]:
    """Return the tags of a run's flow run: its run, its task and its mode."""
    return [run_tag(run), f"task:{task_name(spec)}"[:_LONGEST_TAG], f"mode:{spec.algorithm.mode}"]


def task_name(spec: RunSpec) -> str:
    """Return the task's short name: that of its file without folder and suffix, or of module or dataset."""
    if spec.task.dataset:
        return PurePosixPath(spec.task.dataset).name
    source = PurePosixPath(spec.task.python or spec.task.jsonl or "")
    return source.stem if source.suffix in (".py", ".jsonl", ".json") else source.name

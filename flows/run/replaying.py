"""Replays steps of a run on this machine, during the run or long after it. Nothing of the run is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from consumers.ranks.choose_learner import learner_of
from consumers.replay import Again, StepProgress
from flows.run.locations import named_store
from flows.run.request import RunFailed
from infra.run_handle import opened_run
from infra.runs import find


@contextmanager
def replaying(run: str, store_name: str, progress: StepProgress) -> Iterator[Again]:
    """Yield an object that replays steps of a run."""
    store = named_store(store_name)
    record = find(store, run).with_code("loss", "trainer")
    model = Path(record.model)
    if not model.is_dir():
        raise RunFailed(
            f"the model that run {run} began with is not on this machine: there is no folder {model}"
        )
    with opened_run(store, record, "streamrl-replay") as handle:
        again = Again(handle, lambda: learner_of(str(model), handle.spec, run=run, log=handle.log), progress)
        try:
            yield again
        finally:
            again.close()

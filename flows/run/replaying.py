"""Replays steps of a run on this machine, during the run or long after it. Nothing of the run is changed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from consumers.ranks.choose_learner import learner_of
from consumers.replay import Again, StepProgress
from flows.run.request import RunFailed
from infra.bus import Sent
from infra.roles.context import RoleContext
from infra.roles.heart import Heart
from infra.run_bus import connect
from infra.runs import find
from infra.stores.opening import open_store
from schemas.topics import Topic, Topics


class _NoWriter:
    """A writer for a replay, which writes nothing: `send` is an error."""

    def send(self, topic: Topic, value: bytes, *, key: str, partition: int = 0) -> Sent:
        raise AssertionError(f"a replay writes nothing, and not to {topic.name}")

    def flush(self, deadline_s: float) -> None:
        """Do nothing: nothing was sent."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


@contextmanager
def replaying(run: str, store_url: str, progress: StepProgress) -> Iterator[Again]:
    """Yield an object that replays steps of a run."""
    store = open_store(store_url)
    record = find(store, run)
    if not Path(record.model).is_dir():
        raise RunFailed(
            f"the model that run {run} began with is not on this machine: there is no folder {record.model}"
        )
    bus = connect(record, "streamrl-replay")
    try:
        context = RoleContext(
            record, "replay", 0, store, bus, _NoWriter(), Topics(run, record.spec.lengths.classes),
            Heart(run, "replay", 0), threading.Event(), logging.getLogger("streamrl"),
        )  # fmt: skip
        again = Again(
            context, lambda: learner_of(record.model, record.spec, run=run, log=context.log), progress
        )
        try:
            yield again
        finally:
            again.close()
    finally:
        bus.close()

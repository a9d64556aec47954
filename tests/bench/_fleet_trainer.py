"""A trainer that learns nothing: takes samples as the real one does, and moves ledger and weights on.

It notes when it had each sample in hand: read, decoded and checked.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch

from consumers.learners.lending import made_of
from consumers.steps.publisher import Publisher
from consumers.stream.sample_stream import SampleStream
from infra.bus import Record
from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from schemas.messages import Sample
from schemas.wire import encode
from tests.fakes.trainer import make_step

VOCABULARY = 24  # of `make_tiny_model`
RECEIVED = "bench/received"  # in the store: float64 rows of COLUMNS
COLUMNS = ("received_at", "finished_at", "scored_at", "started_at", "tokens")


class TimedStream(SampleStream):
    """Notes when a sample has come."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.came: list[tuple[float, ...]] = []

    def _take(self, sample: Sample, record: Record) -> None:
        super()._take(sample, record)
        self.came.append(
            (time.time(), sample.finished_at, sample.scored_at, sample.started_at, sample.true_length)
        )


def body(context: RoleContext) -> None:
    """Take one iteration after the other, until told to stop."""
    publisher = Publisher(context, 1).open()
    publisher.publish(0, made_of(_weights(0)))
    stream = TimedStream(context, VOCABULARY, {}, (0, 0))
    context.loaded()
    try:
        for iteration in range(context.spec.algorithm.iterations):
            _train(context, stream, publisher, iteration)
    finally:
        context.store.put(RECEIVED, np.array(stream.came).tobytes())
        publisher.close()
        stream.close()


def _train(context: RoleContext, stream: TimedStream, publisher: Publisher, iteration: int) -> None:
    key = (iteration, 0)
    context.heart.waiting(f"samples of iteration {iteration}", unblocked_by="generators")
    while stream.outstanding(key):
        context.check_stop()
        stream.pump(0.2)
    context.heart.working("training")
    rows = [row for bundle in stream.complete(key) for row in bundle.in_order()]
    step = make_step(context.run, iteration, [(row, row.sample) for row in rows])
    context.writer.send(context.topics.ledger, encode(step), key=str(iteration))
    publisher.publish(iteration + 1, made_of(_weights(iteration + 1)))
    stream.trained(key)


def _weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((16,), float(version))}


if __name__ == "__main__":
    sys.exit(run_role("trainer", body))

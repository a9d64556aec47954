"""The ledger's steps again: their samples by position, in their order."""

from __future__ import annotations

from consumers.places import fetch
from consumers.rows import Row
from infra.bus import read_all
from infra.process import Context
from schemas.messages import StepRecord
from schemas.topics import Topic
from schemas.wire import decode


def steps_after(context: Context, position: int) -> list[StepRecord]:
    """The ledger's records from a position on."""
    records = read_all(
        context.bus, context.topics.ledger, {0: position}, deadline_s=context.spec.deadlines.progress_s
    )
    return [decode(record.value, StepRecord) for record in records]


def fetch_rows(context: Context, samples: Topic, step: StepRecord) -> list[Row]:
    """The samples of a step, in the order of its record."""
    places = list(zip(step.partitions.tolist(), step.offsets.tolist(), strict=True))
    return fetch(
        context.bus, samples, places, what=f"the samples of step {step.step}",
        deadline_s=context.spec.deadlines.progress_s,
    )  # fmt: skip

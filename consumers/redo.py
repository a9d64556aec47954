"""The ledger's steps again: their samples by position, in their order."""

from __future__ import annotations

from consumers.rows import Row
from infra.bus import Record, read_all
from infra.process import Context
from infra.waiting import Wait
from schemas.messages import Sample, StepRecord
from schemas.wire import decode


def steps_after(context: Context, position: int) -> list[StepRecord]:
    """The ledger's records from a position on."""
    records = read_all(
        context.bus, context.topics.ledger, {0: position}, deadline_s=context.spec.deadlines.progress_s
    )
    return [decode(record.value, StepRecord) for record in records]


def fetch_rows(context: Context, step: StepRecord) -> list[Row]:
    """The samples of a step, in the order of its record."""
    places = list(zip(step.partitions.tolist(), step.offsets.tolist(), strict=True))
    wanted = set(places)
    start = {partition: min(offset for p, offset in wanted if p == partition) for partition, _ in wanted}
    last = {partition: max(offset for p, offset in wanted if p == partition) for partition, _ in wanted}
    reader = context.bus.reader(context.topics.samples, start | _ends_elsewhere(context, start))
    found: dict[tuple[int, int], Record] = {}
    wait = Wait(f"the samples of step {step.step}", unblocked_by="the Kafka broker",
                deadline_s=context.spec.deadlines.progress_s)  # fmt: skip
    try:
        while len(found) < len(wanted):
            batch = reader.poll(0.5)
            for record in batch:
                if (record.partition, record.offset) in wanted and record.offset <= last[record.partition]:
                    found[record.partition, record.offset] = record
            wait.progress() if batch else wait.check()
    finally:
        reader.close()
    return [Row(decode(found[place].value, Sample), *place) for place in places]


def _ends_elsewhere(context: Context, start: dict[int, int]) -> dict[int, int]:
    """Partitions that hold nothing of a step are read from their end."""
    probe = context.bus.reader(context.topics.samples)
    try:
        return {partition: end for partition, end in probe.end_offsets().items() if partition not in start}
    finally:
        probe.close()

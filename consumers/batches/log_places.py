"""Fetch samples by their places in the log; places that are near each other are read in one go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from consumers.batches.training_rows import TrainingRow
from infra.bus import Bus, BusError, Record
from infra.run_handle import RunHandle
from infra.waiting import Wait
from schemas.identity import sample_id
from schemas.messages import Sample, StepRecord
from schemas.topics import Topic
from schemas.wire import Unreadable, decode


class Gone(BusError):
    """Raised when needed samples are no longer kept in the log, or no longer readable."""


LogPlace = tuple[int, int]  # partition and offset
_NEAR = 200  # reading so many unwanted records costs less than another request


def fetch(
    bus: Bus, topic: Topic, places: Sequence[LogPlace], *, what: str, deadline_s: float, kept_in: str = "log"
) -> list[TrainingRow]:
    """Fetch the samples at these places, in this order. Raises Gone if one is no longer there.

    `what` names the samples in messages; `deadline_s` is how long to wait without progress;
    `kept_in` names the bus in messages.
    """
    left = {partition: _runs(offsets) for partition, offsets in _by_partition(places).items()}
    wanted, found = set(places), dict[LogPlace, Record]()
    reader = bus.reader(topic)
    wait = Wait(what, unblocked_by="the Kafka broker", deadline_s=deadline_s)
    try:
        begins, ends = reader.begin_offsets(), reader.end_offsets()
        for partition, offset in sorted(wanted):
            begin, end = begins.get(partition, 0), ends.get(partition, 0)
            if not begin <= offset < end:
                kept = f"goes from {begin} to {end - 1}" if end > begin else "has nothing there any more"
                raise Gone(
                    f"{topic.name}[{partition}]@{offset} is gone, one of {what}: the {kept_in} {kept} "
                    "(placement.kafka.retention_hours)"
                )
        reader.seek(ends)
        reader.seek({partition: runs[-1][0] for partition, runs in left.items()})
        while left:
            batch = reader.poll(0.5)
            for record in batch:
                place = record.partition, record.offset
                if place in wanted:
                    found[place] = record
                runs = left.get(record.partition)
                if runs and record.offset >= runs[-1][1]:
                    runs.pop()
                    if not runs:
                        del left[record.partition]
                    reader.seek({record.partition: runs[-1][0] if runs else ends[record.partition]})
            wait.progress() if batch else wait.check()
    finally:
        reader.close()
    return [TrainingRow(_sample(topic, found.get(place), place, what), *place) for place in places]


def fetch_rows(handle: RunHandle, samples: Topic, step: StepRecord) -> list[TrainingRow]:
    """Fetch the samples of a step in the order of its record. Raises Gone if they are not in the log."""
    places = list(zip(step.partitions.tolist(), step.offsets.tolist(), strict=True))
    rows = fetch(
        handle.bus, samples, places, what=f"the samples of step {step.step}",
        deadline_s=handle.spec.deadlines.progress_s, kept_in=handle.kept_in,
    )  # fmt: skip
    for row, group, index in zip(rows, step.groups.tolist(), step.indexes.tolist(), strict=True):
        if (row.sample.group, row.sample.index) != (group, index):
            raise Gone(
                f"{samples.name}[{row.partition}]@{row.offset} is sample {row.sample.id}; step {step.step} "
                f"was made of sample {sample_id(group, index)} there: the topic was made anew since"
            )
    return rows


def _sample(topic: Topic, record: Record | None, place: LogPlace, what: str) -> Sample:
    """Decode a sample that was fit once; raise Gone if its place now holds something else or nothing."""
    try:
        return decode(record.value if record is not None else b"", Sample)
    except Unreadable as error:
        raise Gone(
            f"{topic.name}[{place[0]}]@{place[1]}, one of {what}, is no sample any more: {error}"
        ) from None


def _by_partition(places: Iterable[LogPlace]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for partition, offset in sorted(set(places)):
        found.setdefault(partition, []).append(offset)
    return found


def _runs(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Cut sorted offsets into runs (first, last) that are read in one go; the last run comes first."""
    runs: list[tuple[int, int]] = []
    for offset in offsets:
        if runs and offset - runs[-1][1] <= _NEAR:
            runs[-1] = runs[-1][0], offset
        else:
            runs.append((offset, offset))
    return runs[::-1]

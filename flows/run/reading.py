"""Reads a run from Python: its steps, samples and metrics, while it goes on or long after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from consumers.batches.log_places import fetch_rows
from consumers.steps.ledger import steps_in_ledger
from consumers.stream.recorded_groups import samples_topic
from flows.run.locations import named_store, store_option
from flows.view.metric_rows import MetricRow, step_row, with_rates
from infra.bus import ends_of, near_ends
from infra.gate import Gate, passed_over
from infra.run_handle import RunHandle, opened_run
from infra.runs import find
from producers.tokenizing import load_to_text
from schemas.messages import Sample, StepRecord
from schemas.runspec import RunSpec

_NEWEST = 100  # records of the ledger's end: the same step may stand there more than once


class OpenRun:
    """A run that is open for reading. Nothing of the run is changed."""

    def __init__(self, handle: RunHandle) -> None:
        self._handle, self._samples = handle, samples_topic(handle)
        self.id: str = handle.run
        self.spec: RunSpec = handle.spec

    @property
    def more_words(self) -> str:
        """How to have more records, for people; empty if all there are can be read."""
        return self._handle.more_words

    def ledger(self, start: int = 0) -> Iterator[StepRecord]:
        """Yield the records of the optimizer steps from step `start` on, in order, up to the newest now."""
        begin = self._handle.ledger_before(start)
        return (record for record in steps_in_ledger(self._handle, begin) if record.step >= start)

    def samples(self, step: int | None = None) -> Iterator[Sample]:
        """Yield the samples of a step in the order in which they were trained; None: of all steps.

        Raises Gone if the broker keeps them no longer (placement.kafka.retention_hours).
        """
        for record in self.ledger(step or 0):
            if step is not None and record.step != step:
                return
            yield from (row.sample for row in fetch_rows(self._handle, self._samples, record))

    def newest_step(self) -> int | None:
        """Return the number of the newest optimizer step; None if there is none yet."""
        start = near_ends(self._handle.bus, self._handle.topics.ledger, _NEWEST)[0]
        return max((record.step for record in steps_in_ledger(self._handle, start)), default=None)

    def new_samples(self) -> Iterator[Sample]:
        """Yield samples as generators finish them, from now on and without end: break or Ctrl-C ends it."""
        bus, topic = self._handle.bus, self._handle.topics.samples
        gate = Gate(Sample, self.id, passed_over)
        reader = bus.reader(topic, ends_of(bus, topic), patient=True)
        try:
            while True:
                yield from gate.messages(reader.poll(0.5))
        finally:
            reader.close()

    def metrics(self, start: int = 0) -> Iterator[MetricRow]:
        """Yield the metrics of the steps from step `start` on, as the file metrics.jsonl has them."""
        before: MetricRow | None = None
        for record in self.ledger(start):
            row = step_row(record)
            with_rates([row] if before is None else [dict(before), row])
            yield row
            before = row

    def text(self, tokens: np.ndarray) -> str:
        """Return the text of tokens, such as `sample.prompt_tokens` or `sample.tokens`.

        The folder of the model that the run began with has to be on this machine.
        """
        return self._to_text(tokens)

    @cached_property
    def _to_text(self) -> Callable[[np.ndarray], str]:
        return load_to_text(self._handle.record.model)


@contextmanager
def open_run(run: str, store: str = "local", *, archive_alone: bool = False) -> Iterator[OpenRun]:
    """Open a run for reading: `with open_run("count-1") as run: …`.

    `store`: the URL of the run's object store; `local`: the store of this machine. `archive_alone`: read the
    run's archive, and ask no broker. Raises RunError if there is no such run, BusError if the broker does not
    answer, ArchiveError if there is no archive to read alone.
    """
    opened = named_store(store)
    with opened_run(
        opened, find(opened, run), "streamrl-python", archive_alone=archive_alone,
        store_option=store_option(store),
    ) as handle:  # fmt: skip
        yield OpenRun(handle)

"""Makes a step file of a run, and opens one as if it were a run: without broker, store or network."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from consumers.replay import Again, CapturedSteps, StateBefore
from consumers.steps.failing import FailedSteps
from flows.run.request import RunFailed
from infra.bus import Record
from infra.machine_kind import kind_of_machine
from infra.run_handle import RunHandle
from infra.step_file.index import StepFileIndex
from infra.step_file.step_file_writer import StepFileContent, Written, write_step_file
from infra.step_file.unpacking import Read, open_step_file
from infra.stock_bus import HeldStock, StockBus
from infra.stores.file_store import FileStore
from infra.weights.bits import NAMES, Bits, bits_of
from infra.weights.folder import ModelFolder
from schemas.losses import SAMPLES
from schemas.messages import StepRecord
from schemas.topics import Topics
from schemas.wire import Unreadable, decode, encode


@dataclass(frozen=True)
class OpenStepFile:
    """An open step file: a run to read, and the state to begin with."""

    index: StepFileIndex
    handle: RunHandle
    start: StateBefore


@dataclass(frozen=True)
class MadeStepFile:
    """A step file that was written."""

    path: Path
    size: int
    first: int
    last: int
    samples_size: int  # bytes of its samples in the log


def make_step_file(
    again: Again, handle: RunHandle, path: Path | None, first: int | None, last: int | None, *, failed: bool,
    written: Written,
) -> MadeStepFile:  # fmt: skip
    """Write a step file; by default RUN-stepN.tar.zst in the current folder."""
    found = again.capture(first, last, failed=failed)
    spec, folder = handle.spec, ModelFolder(handle.record.model)
    reference = spec.loss.reference if again.needs.reference else None
    own = reference not in (None, SAMPLES, handle.record.model)
    other = ModelFolder(str(reference)) if own else None
    content = StepFileContent(
        record=handle.record, first=found.first, last=found.last, asked=found.last, failed=failed,
        made_on=_made_on(found), samples_of=found.samples.name.removesuffix(".samples"),
        records=_records(found, handle), state={name: bits_of(one) for name, one in found.state.items()},
        model=folder.bits() if spec.model.lora or (again.needs.reference and other is None) else {},
        reference=other.bits() if other else {}, model_files=folder.beside,
        reference_files=other.beside if other else {},
    )  # fmt: skip
    path = path or Path(f"{handle.run}-step{found.last}.tar.zst")
    size = write_step_file(content, path, written)
    samples = sum(len(one.value) for one in content.records["samples"])
    return MadeStepFile(path, size, found.first, found.last, samples)


def _made_on(found: CapturedSteps) -> str:
    newest = found.failed or found.records[-1]
    return newest.made_on or kind_of_machine()


def _records(found: CapturedSteps, handle: RunHandle) -> dict[str, list[Record]]:
    ledger, samples = handle.topics.ledger.name, found.samples.name
    rows = {(row.partition, row.offset): row.sample for row in found.rows}
    records = {
        "ledger": [Record(ledger, 0, one.step, str(one.step).encode(), encode(one)) for one in found.records],
        "samples": [
            Record(samples, *place, sample.id.encode(), encode(sample)) for place, sample in rows.items()
        ],
    }
    if found.failed is not None:
        records["failed"] = [Record("failed", 0, found.failed.step, b"", encode(found.failed))]
    return records


@contextmanager
def opened_step_file(path: Path, read: Read, *, own_code: bool) -> Iterator[OpenStepFile]:
    """Open a step file. `own_code`: whether a loss or learner of the user's own may be imported."""
    with tempfile.TemporaryDirectory(prefix="streamrl-step-") as folder:
        found = open_step_file(path, Path(folder), read)
        record = found.record
        named = [one for one in (record.spec.loss.imported, record.spec.trainer.imported) if one]
        if named and not own_code:
            raise RunFailed(
                f"{path} was trained with the run's own code, {', '.join(named)}, which is not in the file. "
                "If it is on this machine, and you trust it, say --own-code"
            )
        record = record.with_code("loss", "trainer")
        store = FileStore(f"file://{folder}/store")
        store.create()
        topics = Topics(record.id, record.spec.lengths.classes)
        stocks = {
            topics.ledger.name: HeldStock(found.records.get("ledger", ())),
            f"{found.index.samples_of}.samples": HeldStock(found.records["samples"]),
        }
        for one in found.records.get("failed", ()):
            FailedSteps(store, record.id).keep(_failed(one, path))
        handle = RunHandle(record, store, StockBus(stocks, str(path)), topics, logging.getLogger("streamrl"))
        state = {name: _tensor(bits) for name, bits in found.state.items()}
        yield OpenStepFile(
            found.index, handle, StateBefore(found.index.first, state, f"the step file {path}")
        )


def _failed(record: Record, path: Path) -> StepRecord:
    try:
        return decode(record.value, StepRecord)
    except Unreadable as error:
        raise RunFailed(f"{path}: the record of the failed step can't be read: {error}") from error


def _tensor(bits: Bits) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(bits.raw), dtype=torch.uint8) if bits.data.size else torch.empty(0)
    return raw.view(getattr(torch, NAMES[bits.dtype][0])).view(bits.shape)

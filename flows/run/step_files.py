"""Opens a step file as if it were a run: without broker, store or network."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from consumers.replay import StateBefore
from consumers.steps.failing import FailedSteps
from flows.run.request import RunFailed
from infra.run_handle import RunHandle
from infra.step_file.index import StepFileIndex
from infra.step_file.unpacking import OpenedStepFile, Read, open_step_file
from infra.stock_bus import HeldStock, StockBus
from infra.stores.file_store import FileStore
from infra.weights.bits import NAMES, Bits, Model
from schemas.messages import Prompt, Sample, StepRecord
from schemas.topics import Topics
from schemas.wire import Message, Unreadable, decode

_KINDS: dict[str, type[Message]] = {
    "ledger": StepRecord, "failed": StepRecord, "samples": Sample, "prompts": Prompt,
}  # fmt: skip


@dataclass(frozen=True)
class OpenStepFile:
    """An open step file: a run to read, the state to begin with, and weights that drew samples."""

    index: StepFileIndex
    handle: RunHandle
    start: StateBefore
    versions: Mapping[int, Model]  # by version; those that the state has not


@contextmanager
def opened_step_file(path: Path, read: Read, *, own_code: bool) -> Iterator[OpenStepFile]:
    """Open a step file. `own_code`: whether a loss or learner of the user's own may be imported."""
    with tempfile.TemporaryDirectory(prefix="streamrl-step-") as folder:
        found = open_step_file(path, Path(folder), read)
        record = found.record
        named = [one for one in (record.spec.loss.imported, record.spec.trainer.imported) if one]
        if not own_code:
            refuse_own_code(path, named)
        record = record.with_code("loss", "trainer")
        store = FileStore(f"file://{folder}/store")
        store.create()
        topics = Topics(record.id, record.spec.lengths.classes)
        stocks = {
            topics.ledger.name: HeldStock(found.records.get("ledger", ())),
            f"{found.index.samples_of}.samples": HeldStock(found.records["samples"]),
            f"{found.index.samples_of}.prompts": HeldStock(found.records.get("prompts", ())),
        }
        _check_schemas(found, path)
        for one in found.records.get("failed", ()):
            FailedSteps(store, record.id).keep(decode(one.value, StepRecord))
        handle = RunHandle(record, store, StockBus(stocks, str(path)), topics, logging.getLogger("streamrl"))
        state = {name: tensor_of(bits) for name, bits in found.state.items()}
        start = StateBefore(found.index.first, state, f"the step file {path}")
        yield OpenStepFile(found.index, handle, start, found.versions)


def refuse_own_code(source: object, named: Sequence[str]) -> None:
    """Raise RunFailed if a step file names code of a user's own."""
    if named:
        raise RunFailed(
            f"{source} was made with the run's own code, {', '.join(named)}, which is not in the file. "
            "If it is on this machine, and you trust it, say --own-code"
        )


def _check_schemas(found: OpenedStepFile, path: Path) -> None:
    """Raise RunFailed if records are of a schema that this version of StreamRL does not read."""
    for name, kind in _KINDS.items():
        records = found.records.get(name, ())
        for record in records if name == "failed" else records[:1]:
            try:
                decode(record.value, kind)
            except Unreadable as error:
                raise RunFailed(
                    f"{path}: its {name} can't be read: {error}. StreamRL {found.index.streamrl[:40]} made "
                    f"the file, and this is {version('streamrl')}: open it with that version"
                ) from error


def tensor_of(bits: Bits) -> torch.Tensor:
    """Return bits as a tensor of torch."""
    raw = torch.frombuffer(bytearray(bits.raw), dtype=torch.uint8) if bits.data.size else torch.empty(0)
    return raw.view(getattr(torch, NAMES[bits.dtype][0])).view(bits.shape)

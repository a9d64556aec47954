"""Writes a step file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from blake3 import blake3

from infra.bus import Record
from infra.keys import ring_from_env
from infra.runs import RunRecord
from infra.step_file.index import (
    LARGEST_INDEX,
    STEP_FILE_FORMAT,
    Member,
    StepFileError,
    StepFileIndex,
    StepFilePart,
    StoredTensor,
    index_bytes,
)
from infra.step_file.layout import counting_pays, laid_out, packed_records
from infra.step_file.tar import TarWriter
from infra.weights.bits import Model
from infra.weights.digest import digest_of

Written = Callable[[int, int], None]  # bytes that are written, of how many


@dataclass(frozen=True)
class StepFileContent:
    """All that a step file holds."""

    record: RunRecord
    first: int
    last: int
    asked: int
    failed: bool
    made_on: str
    samples_of: str  # the run whose samples were trained
    records: Mapping[
        str, Sequence[Record]
    ]  # of `ledger` and `samples`; `failed` if the step failed; `prompts`
    state: Model
    model: Model = field(default_factory=dict)  # only if a replay needs it beside the state
    reference: Model = field(default_factory=dict)
    versions: Mapping[int, Model] = field(
        default_factory=dict
    )  # that drew samples, if the state has them not
    model_files: Mapping[str, bytes] = field(default_factory=dict)  # config and tokenizer
    reference_files: Mapping[str, bytes] = field(default_factory=dict)


def write_step_file(content: StepFileContent, path: Path, written: Written = lambda done, total: None) -> int:
    """Write a step file; return its size in bytes. Raises StepFileError."""
    record = content.record.model_copy(update={"signature": None, "bootstrap_servers": "", "store": ""})
    texts = {"run.json": record.model_dump_json().encode()}
    texts |= {f"model/{name}": raw for name, raw in content.model_files.items()}
    texts |= {f"reference/{name}": raw for name, raw in content.reference_files.items()}
    texts |= {f"records/{name}": packed_records(records) for name, records in content.records.items()}
    parts: dict[StepFilePart, Model] = {
        "model": content.model, "reference": content.reference, "state": content.state,
    }  # fmt: skip
    tensors = [one for part in parts for one in _tensors(part, parts[part], content.model)]
    for number, model in content.versions.items():
        tensors += _tensors("version", model, content.state, number)
    index = StepFileIndex(
        format=STEP_FILE_FORMAT, streamrl=version("streamrl"), run=content.record.id, first=content.first,
        last=content.last, asked=content.asked, failed=content.failed, made_on=content.made_on,
        created_at=time.time(),
        partitions=content.record.spec.lengths.classes, samples_of=content.samples_of,
        members=tuple(
            Member(name=name, size=len(raw), digest=str(blake3(raw).hexdigest()))
            for name, raw in texts.items()
        ),
        tensors=tuple(tensors),
    )  # fmt: skip
    head = index_bytes(index, ring_from_env())
    if len(head) > LARGEST_INDEX:
        raise StepFileError(f"{path}: the index of all tensors would have {len(head):,} bytes, too many")
    done = 0
    try:
        with TarWriter(path) as tar:
            tar.add("index.json", len(head), [head])
            for name, raw in texts.items():
                tar.add(name, len(raw), [raw])
                done += len(raw)
                written(done, index.size)
            for number, one in enumerate(index.tensors):
                mine = parts[one.of] if one.version is None else content.versions[one.version]
                raw = laid_out(mine[one.name], parts[one.base].get(one.minus))
                tar.add(f"tensors/{number}", len(raw), [raw])
                done += len(raw)
                written(done, index.size)
    except OSError as error:
        raise StepFileError(f"{path} can't be written: {error.strerror}") from error
    return path.stat().st_size


def _tensors(of: StepFilePart, tensors: Model, base: Model, version: int | None = None) -> list[StoredTensor]:
    """Return how to store some tensors: counted from those of `base` where that is smaller."""
    found = []
    for name, bits in tensors.items():
        began_as = f"weights.{name}" if of == "version" else name.removeprefix("weights.")
        counts = of != "model" and began_as in base and counting_pays(bits, base[began_as])
        found.append(
            StoredTensor(
                of=of, name=name, dtype=bits.dtype, shape=bits.shape, digest=digest_of(bits),
                minus=began_as if counts else "", version=version,
            )
        )  # fmt: skip
    return found

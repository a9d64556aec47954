"""Opens a step file: checks all that it says, and unpacks it into memory and a folder.

A file from a stranger may claim anything. The index is bounded and checked first. Then room is looked for,
and each part is read in order, no longer than the index says, and compared with its digest.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from pydantic import ValidationError

from infra.bus import Record
from infra.keys import ring_from_env
from infra.machine_memory import free_memory
from infra.runs import RunRecord
from infra.step_file.index import LARGEST_INDEX, Member, StepFileError, StepFileIndex, read_index
from infra.step_file.layout import restored, unpacked_records
from infra.step_file.tar import TarReader
from infra.weights.bits import Bits, file_head
from infra.weights.digest import digest_of
from infra.weights.folder import SINGLE

_log = logging.getLogger("streamrl")
_SUFFIX = ".tar.zst"
_DENSEST = 2000  # bytes that one byte of the file may become: nothing that we write is as dense
# Keys of a model's config by which transformers would import code, fetch it, or choose other code to run.
_CODE = {
    "auto_map", "custom_pipelines", "quantization_config", "attn_implementation", "_attn_implementation",
    "_attn_implementation_internal", "experts_implementation", "_experts_implementation", "use_kernels",
}  # fmt: skip

Read = Callable[[int, int], None]  # bytes that are read, of how many


@dataclass(frozen=True)
class OpenedStepFile:
    """The content of a step file. Model and reference lie in the folder that was given."""

    index: StepFileIndex
    record: RunRecord  # its model, and its reference if it has one, are where they were unpacked
    records: Mapping[str, list[Record]]
    state: Mapping[str, Bits]
    versions: Mapping[int, Mapping[str, Bits]]  # weights that drew samples


def is_step_file(name: str) -> bool:
    """Whether a name stands for a step file, not for a run."""
    return name.endswith(_SUFFIX) or Path(name).is_file()


def open_step_file(path: Path, folder: Path, read: Read = lambda done, total: None) -> OpenedStepFile:
    """Read a step file, and write its models into a folder. Raises StepFileError or KeysError."""
    with TarReader(path) as tar:
        raw = tar.whole("index.json", None, LARGEST_INDEX)
        index = read_index(raw, str(path), ring_from_env())
        _look_for_room(path, index, folder)
        texts: dict[str, bytes] = {}
        done = 0
        for member in index.members:
            texts[member.name] = _checked(tar, member, path)
            done += member.size
            read(done, index.size)
        tensors: dict[str, dict[str, Bits]] = {"model": {}, "reference": {}, "state": {}}
        versions: dict[int, dict[str, Bits]] = {}
        for number, one in enumerate(index.tensors):
            raw = tar.whole(f"tensors/{number}", one.size, one.size)
            base = tensors[one.base][one.minus] if one.minus else None
            bits = restored(raw, one.dtype, one.shape, base)
            if digest_of(bits) != one.digest:
                raise StepFileError(f"{path} is damaged: tensor {one.name[:100]} has other bits")
            mine = tensors[one.of] if one.version is None else versions.setdefault(one.version, {})
            mine[one.name] = bits
            done += one.size
            read(done, index.size)
    record = _record(texts["run.json"], index, path)
    state = tensors["state"]
    model = tensors["model"] or {
        name.removeprefix("weights."): bits for name, bits in state.items() if name.startswith("weights.")
    }
    _write_model(folder / "model", texts, "model", model, path)
    loss = record.spec.loss
    if tensors["reference"]:
        _write_model(folder / "reference", texts, "reference", tensors["reference"], path)
        loss = loss.model_copy(update={"reference": str(folder / "reference")})
    spec = record.spec.model_copy(update={"loss": loss})
    record = record.model_copy(update={"model": str(folder / "model"), "spec": spec})
    records = {
        member.name.removeprefix("records/"): _records(texts[member.name], member, index, path)
        for member in index.members
        if member.name.startswith("records/")
    }
    return OpenedStepFile(index, record, records, state, versions)


def _look_for_room(path: Path, index: StepFileIndex, folder: Path) -> None:
    size = path.stat().st_size
    if index.size > size * _DENSEST:
        raise StepFileError(
            f"{path} has {size:,} bytes and says that it holds {index.size:,}: it is no step file of ours"
        )
    memory, disk = free_memory(), shutil.disk_usage(folder).free
    for room, where in ((memory, "in memory"), (disk, f"on the disk of {folder} (TMPDIR chooses another)")):
        if index.size > room:
            raise StepFileError(
                f"{path} holds {index.size:,} bytes, and {room:,} are free {where}: use a larger machine"
            )


def _checked(tar: TarReader, member: Member, path: Path) -> bytes:
    raw = tar.whole(member.name, member.size, member.size)
    if str(blake3(raw).hexdigest()) != member.digest:
        raise StepFileError(f"{path} is damaged: {member.name} has other bits than its index says")
    return raw


def _record(raw: bytes, index: StepFileIndex, path: Path) -> RunRecord:
    try:
        record = RunRecord.model_validate_json(raw)
    except (ValidationError, ValueError, RecursionError) as error:
        raise StepFileError(
            f"{path}: its run.json is not a run's record as this version of StreamRL knows it. If the file "
            f"is honest, StreamRL {index.streamrl[:40]}, which made it, opens it: {str(error)[:500]}"
        ) from error
    if record.id != index.run:
        raise StepFileError(f"{path} is of run {index.run}, and its run.json of run {record.id[:100]}")
    if record.spec.lengths.classes != index.partitions:
        raise StepFileError(f"{path}: its index and its run.json do not agree about the length classes")
    return record


def _records(raw: bytes, member: Member, index: StepFileIndex, path: Path) -> list[Record]:
    kind = member.name.removeprefix("records/")
    run = index.samples_of if kind in ("samples", "prompts") else index.run
    return list(unpacked_records(raw, f"{run}.{kind}", str(path)))


def _write_model(
    folder: Path, texts: Mapping[str, bytes], part: str, tensors: Mapping[str, Bits], path: Path
) -> None:
    """Write a model's folder. Its names are of a known list, and its config must not lead to code."""
    folder.mkdir(mode=0o700)
    for name, raw in texts.items():
        if name.startswith(f"{part}/"):
            _refuse_code(name, raw, path)
            (folder / name.removeprefix(f"{part}/")).write_bytes(raw)
    head, names = file_head({name: (bits.dtype, bits.shape) for name, bits in tensors.items()})
    with (folder / SINGLE).open("wb") as file:
        file.write(head)
        for name in names:
            file.write(tensors[name].raw)
        file.flush()
        os.fsync(file.fileno())


def _refuse_code(name: str, raw: bytes, path: Path) -> None:
    if not name.endswith(".json"):
        return
    try:
        found = _keys(json.loads(raw)) & _CODE
    except (ValueError, RecursionError) as error:
        raise StepFileError(f"{path}: {name} is no JSON: {str(error)[:200]}") from error
    if found:
        raise StepFileError(
            f"{path}: {name} has {min(found)}, by which code would be fetched or chosen. A step file runs no "
            "code of its own, so this one can't be replayed"
        )


def _keys(said: object) -> set[str]:
    """Return the keys of a JSON value, at all depths."""
    if isinstance(said, list):
        return {key for one in said for key in _keys(one)}
    if not isinstance(said, dict):
        return set()
    return {*said, *(key for one in said.values() for key in _keys(one))}

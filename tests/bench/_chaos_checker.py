"""Checks a run from outside: topics, ledger, weights and checkpoints, with none of the run's own readers.

Only formats are known here: the envelope of a record, JSON manifests, and the meaning of their fields. So a
mistake in a reader of the product is not repeated in the checker.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from kafka import KafkaConsumer, TopicPartition

_ENVELOPE = struct.Struct("<4sHHII")
_DICTIONARIES = Path(__file__).parents[2] / "schemas" / "dictionaries"
_KINDS = {"F32": "float32", "BF16": "bfloat16", "U8": "uint8", "I64": "int64", "F64": "float64"}


@dataclass(frozen=True)
class Expected:
    """What a run had to do, as its run file says."""

    iterations: int
    groups: int
    group_size: int
    staleness: float
    sync: bool

    @property
    def samples(self) -> int:
        """Samples of an iteration."""
        return self.groups * self.group_size


@dataclass
class Findings:
    """Each list names what is wrong; all are empty after a run that kept its promises."""

    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    bits: list[str] = field(default_factory=list)
    store: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)  # of the weights after each step

    def problems(self) -> list[str]:
        """All of them."""
        return [*self.lost, *self.twice, *self.stale, *self.bits, *self.store]


def fields_of(value: bytes) -> dict[str, Any] | None:
    """The fields of a record, arrays as numpy arrays; None if it is no record of ours."""
    try:
        magic, form, _, header_size, body_size = _ENVELOPE.unpack_from(value)
        if form == 2:
            words = zstandard.ZstdCompressionDict((_DICTIONARIES / f"{header_size:08x}.bin").read_bytes())
            return fields_of(zstandard.ZstdDecompressor(dict_data=words).decompress(value[12:]))
        start = _ENVELOPE.size + header_size
        start += -start % 8
        if magic != b"SRL\0" or start + body_size != len(value):
            return None
        header = msgspec.msgpack.decode(value[_ENVELOPE.size : _ENVELOPE.size + header_size])
        found = dict(header["fields"]) | {"kind": header["kind"]}
        for name, dtype, count, offset in header["arrays"]:
            found[name] = np.frombuffer(value, np.dtype(dtype.lstrip("+")), count, start + offset)
            if dtype.startswith("+"):
                found[name] = found[name].cumsum(dtype=np.int64)
    except Exception:  # poison: whatever it is, it is no record of ours
        return None
    return found


def records(servers: str, topic: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Partition, position and fields of all readable records of a topic."""
    consumer = KafkaConsumer(bootstrap_servers=servers.split(","), enable_auto_commit=False)
    try:
        parts = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic) or ()]
        consumer.assign(parts)
        consumer.seek_to_beginning(*parts)
        ends = consumer.end_offsets(parts)
        while any(consumer.position(part) < end for part, end in ends.items()):
            for batch in consumer.poll(timeout_ms=500).values():
                for record in batch:
                    found = fields_of(record.value or b"")
                    if found is not None:
                        yield record.partition, record.offset, found
    finally:
        consumer.close()


def check(servers: str, run: str, store: Path, expected: Expected, calm: list[str] | None) -> Findings:
    """All that is wrong with a run that has ended; `calm`: the roots of one that nobody disturbed."""
    found = Findings()
    steps = _steps(servers, run, expected, found)
    found.roots = [step["root_out"] for step in steps]
    samples = {
        (partition, offset): fields
        for partition, offset, fields in records(servers, f"{run}.samples")
        if fields["kind"] == "sample" and fields["run"] == run
    }
    for step in steps:
        _check_rows(step, samples, found.roots, expected, found)
    if calm is not None and found.roots != calm[: len(found.roots)]:
        first = next(n for n, (a, b) in enumerate(zip(found.roots, calm, strict=False)) if a != b)
        found.bits.append(f"step {first} has other bits than in the undisturbed run")
    _check_store(store / "runs" / run, steps, found)
    return found


def _steps(servers: str, run: str, expected: Expected, found: Findings) -> list[dict[str, Any]]:
    """The first record of each step, in order."""
    first: dict[int, dict[str, Any]] = {}
    for _, _, fields in records(servers, f"{run}.ledger"):
        if fields["kind"] == "step" and fields["run"] == run and "step" in fields:  # poison has no number
            first.setdefault(fields["step"], fields)
    missing = sorted(set(range(expected.iterations)) - set(first))
    if missing or len(first) != expected.iterations:
        found.lost.append(
            f"the ledger has {len(first)} of {expected.iterations} steps; missing: {missing[:5]}"
        )
    return [first[number] for number in sorted(first)]


def _check_rows(
    step: dict[str, Any], samples: dict[tuple[int, int], dict[str, Any]], roots: list[str],
    expected: Expected, found: Findings,
) -> None:  # fmt: skip
    number, iteration = step["step"], step["iteration"]
    rows = list(zip(step["groups"].tolist(), step["indexes"].tolist(), strict=True))
    first = iteration * expected.groups
    wanted = {(g, i) for g in range(first, first + expected.groups) for i in range(expected.group_size)}
    found.lost += [f"step {number}: sample {row} is not trained" for row in sorted(wanted - set(rows))[:3]]
    found.twice += [
        f"step {number}: {row} is not of this iteration" for row in sorted(set(rows) - wanted)[:3]
    ]
    if len(rows) != len(set(rows)):
        found.twice.append(f"step {number}: a sample is trained twice")
    places = zip(step["partitions"].tolist(), step["offsets"].tolist(), strict=True)
    for row, place in zip(rows, places, strict=True):
        sample = samples.get(place)
        if sample is None or (sample["group"], sample["index"]) != row:
            found.lost.append(f"step {number}: {row} does not stand at {place} in the samples' topic")
            continue
        oldest, newest = int(sample["versions"][0]), int(sample["versions"][-1])
        if iteration - oldest > math.ceil(expected.staleness) or newest > iteration:
            found.stale.append(f"step {number}: {row} was made by weights {oldest}..{newest}")
        for version, root in zip(sample["versions"].tolist(), sample["roots"], strict=True):
            if version and root != roots[version - 1]:
                found.bits.append(f"step {number}: {row} was made by weights that are not version {version}")


def _check_store(folder: Path, steps: list[dict[str, Any]], found: Findings) -> None:
    """Weights and checkpoints go with the ledger."""
    for file in sorted(folder.glob("weights/v*/manifest.json")):
        manifest = json.loads(file.read_text())
        version = manifest["version"]
        if version and manifest["root"] != steps[version - 1]["root_out"]:
            found.store.append(f"weights {version} are not those of step {version - 1}")
    checkpoints = sorted(folder.glob("checkpoints/*/manifest.json"))
    for file in checkpoints:
        manifest = json.loads(file.read_text())
        if manifest["step"] and manifest["root"] != steps[manifest["step"] - 1]["root_out"]:
            found.store.append(f"{file.parent.name} does not hold the weights of step {manifest['step'] - 1}")
        if not _is_whole(folder.parents[1] / manifest["state"], manifest["tensors"]):
            found.store.append(f"{file.parent.name}: its state is not there, or has other bits")
    newest = max((json.loads(file.read_text())["iteration"] for file in checkpoints), default=0)
    if newest != len(steps):
        found.store.append(f"the newest checkpoint is of iteration {newest} of {len(steps)}")


def _is_whole(file: Path, tensors: dict[str, Any]) -> bool:
    """Whether a safetensors file has just these tensors, each with the bits of its digest."""
    if not file.is_file():
        return False
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = {name: one for name, one in json.loads(raw[8:start]).items() if name != "__metadata__"}
    if set(header) != set(tensors):
        return False
    for name, one in header.items():
        begin, end = (start + offset for offset in one["data_offsets"])
        said = tensors[name]
        kind = f"{_KINDS.get(one['dtype'], one['dtype'])}{list(one['shape'])}"
        if blake3(kind.encode() + b"\0" + raw[begin:end]).hexdigest(16) != said["digest"]:
            return False
    return True

"""Times to write and to read the record of a step, packed and not."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from functools import partial

import numpy as np
from msgspec import structs

from schemas.messages import StepRecord
from schemas.wire import decode, encode

_TIMES, _OFTEN = 7, 20


def codec_us(record: StepRecord, rows: int) -> dict[str, float]:
    """Microseconds for the record of a step with so many rows, made of this one's."""
    wide = _of(record, rows)
    found = {}
    for name, packs in (("", True), ("_unpacked", False)):
        raw = encode(wide, packs=packs)
        found[f"write{name}"] = _us(partial(encode, wide, packs=packs))
        found[f"read{name}"] = _us(partial(decode, raw, StepRecord))
    return found


def _us(call: Callable[[], object]) -> float:
    return round(min(timeit.repeat(call, number=_OFTEN, repeat=_TIMES)) / _OFTEN * 1e6, 1)


def _of(record: StepRecord, rows: int) -> StepRecord:
    """The record with so many rows: others' groups, places, problems and log-probabilities."""
    count = record.groups.size
    times = -(-rows // count)
    number = np.arange(times * count) // count
    of_rows = {
        field: np.tile(value, times)[:rows]
        for field in record.__struct_fields__
        if isinstance(value := getattr(record, field), np.ndarray) and value.size == count
    }
    draw = np.random.default_rng(0)
    for field in ("logprobs", "gaps"):
        of_rows[field] = (of_rows[field] * draw.uniform(0.5, 2.0, rows)).astype(np.float32)
    groups = of_rows["groups"] + number[:rows] * (int(np.ptp(record.groups)) + 1)
    offsets = of_rows["offsets"] + number[:rows] * count
    problems = [f"{name}-{n}" for name, n in zip(record.problem_ids * times, number, strict=True)][:rows]
    return structs.replace(
        record, **(of_rows | {"groups": groups, "offsets": offsets}), problem_ids=problems,
        microbatches=np.array([rows], np.int32), losses=np.zeros(1), replayed=0,
    )  # fmt: skip

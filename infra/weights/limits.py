"""Limits on the sizes of weights that come from outside, checked before memory is taken for them.

STREAMRL_LARGEST_MODEL   most bytes of a model that is read, such as 80e9; by default this machine's memory
"""

from __future__ import annotations

import json
import os
from typing import Any

import zstandard

from infra.weights.weights_error import WeightsError

LARGEST_MODEL_VARIABLE = "STREAMRL_LARGEST_MODEL"
MANIFEST = 32 << 20  # bytes of a manifest: a model of 100,000 tensors and a terabyte needs half of them
LARGEST_CHUNK = (
    512 << 20
)  # bytes: publishers end a chunk with the group that passes 8 MiB; files beside a model have 64 MiB
_VALUES = 2 << 20  # values in a manifest


def largest_model() -> int:
    """Return the most bytes of a model. Raises WeightsError if the variable is no positive number."""
    said = os.environ.get(LARGEST_MODEL_VARIABLE)
    try:
        found = int(float(said)) if said else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OverflowError):
        found = 0
    if found <= 0:
        raise WeightsError(f"{LARGEST_MODEL_VARIABLE}={said}: a number of bytes is expected, such as 80e9")
    return found


def json_in(raw: bytes, where: str) -> Any:
    """Parse JSON. Raises WeightsError if it is too large, nested too deeply or no JSON; `where` names it."""
    if len(raw) > MANIFEST:
        raise WeightsError(f"{where} has {len(raw)} bytes; {MANIFEST} are the most")
    if (values := raw.count(b",") + raw.count(b"[")) > _VALUES:
        raise WeightsError(f"{where} has {values} values; {_VALUES} are the most")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{where} can't be read: {str(error)[:500]}") from None


def unpacked_within_limits(data: bytes, where: str, most: int = MANIFEST) -> bytes:
    """Unpack what zstd has packed. Raises WeightsError as soon as there are more than `most` bytes."""
    found = bytearray()
    try:
        stream = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data)
        while part := stream.read(min(1 << 20, most + 1 - len(found))):
            found += part
            if len(found) > most:
                raise WeightsError(f"{where} is damaged: unpacked it has more than {most} bytes")
    except (zstandard.ZstdError, MemoryError) as error:
        raise WeightsError(f"{where} was packed wrongly: {error}") from error
    return bytes(found)

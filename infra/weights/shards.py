"""Writes a model as a Hugging Face folder has it: one safetensors file, or several with an index.

model.safetensors                                all in one file
model-00001-of-00003.safetensors …               several: no file is larger than a shard, unless a tensor is
model.safetensors.index.json                     which tensor is in which file
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from infra.weights.bits import Bits, file_head, size_of
from infra.weights.folder import INDEX, SINGLE

SHARD = 4 << 30  # bytes of a file

TypedShapes = Mapping[str, tuple[str, tuple[int, ...]]]  # type and shape by name


def write_model(
    folder: Path, shapes: TypedShapes, tensor: Callable[[str], Bits], *, shard: int = SHARD,
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> int:  # fmt: skip
    """Write a model's tensors, with one in memory at a time. Returns their bytes."""
    parts = _parts(shapes, shard)
    whole = sum(size_of(*one) for one in shapes.values())
    written = 0
    places: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        file = SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        head, ordered = file_head({name: shapes[name] for name in names})
        with (folder / file).open("wb") as opened:
            opened.write(head)
            for name in ordered:
                opened.write(tensor(name).raw)
                written += size_of(*shapes[name])
                progress(written / max(1, whole), f"writing {file}")
        places |= dict.fromkeys(names, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": whole}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return whole


def _parts(shapes: TypedShapes, shard: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    held = 0
    for name in sorted(shapes):
        size = size_of(*shapes[name])
        if parts[-1] and held + size > shard:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    return parts

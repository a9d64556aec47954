"""Names of a version's tensors in a model's folder: there each expert of a mixture has tensors of its own.

Versions of a run have the names of the trainer's model, which has all experts of a layer in one tensor
(`infra.weights.expert_names`). `from_pretrained` knows both; vLLM and other programs know the folder's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from infra.weights.bits import Bits
from infra.weights.expert_names import DOWN, GATE_UP, expert_tensor
from infra.weights.shards import TypedShapes


@dataclass(frozen=True)
class _Names:
    """How folders of one kind of model name the parts of an expert."""

    parts: dict[str, tuple[str, ...]]  # of a tensor of all experts, in the order of their rows
    renamed: dict[str, str]  # parts of names: the trainer's, and the folder's


@dataclass(frozen=True)
class FolderTensor:
    """A tensor of a folder: a tensor of a version, or one expert's part of it."""

    whole: str  # the version's
    shape: tuple[int, ...]
    start: int = 0  # its first element there


def folder_tensors(kind: str | None, shapes: TypedShapes) -> dict[str, FolderTensor]:
    """Return the tensors of the folder that a version is written to. `kind`: the config's model_type."""
    names = _names_of(kind) if any(_all_experts(name) for name in shapes) else None
    if names is None:
        return {name: FolderTensor(name, shape) for name, (_, shape) in shapes.items()}
    found: dict[str, FolderTensor] = {}
    for name, (_, shape) in shapes.items():
        renamed = name
        for ours, its in names.renamed.items():
            renamed = renamed.replace(ours, its)
        if _all_experts(name):
            found |= _experts(name, renamed, shape, names)
        else:
            found[renamed] = FolderTensor(name, shape)
    return found


def folder_reader(tensors: dict[str, FolderTensor], whole: Callable[[str], Bits]) -> Callable[[str], Bits]:
    """Return a function that reads a folder's tensors from those of a version."""

    def tensor(name: str) -> Bits:
        found = tensors[name]
        bits = whole(found.whole)
        return Bits(bits.dtype, found.shape, bits.part(found.start, math.prod(found.shape)))

    return tensor


def _all_experts(name: str) -> bool:
    found = expert_tensor(name)
    return found is not None and found.expert is None


def _experts(
    name: str, renamed: str, shape: tuple[int, ...], names: _Names
) -> Iterator[tuple[str, FolderTensor]]:  # fmt: skip
    """Yield the tensors of each expert in a tensor of all."""
    layer, _, part = renamed.rpartition(".")
    parts = names.parts[part]
    rows = shape[1] // len(parts)
    one = (rows, *shape[2:])
    for expert in range(shape[0]):
        for number, title in enumerate(parts):
            start = (expert * len(parts) + number) * math.prod(one)
            yield f"{layer}.{expert}.{title}.weight", FolderTensor(name, one, start)


def _names_of(kind: str | None) -> _Names | None:
    """Return how transformers names the experts of a kind of model in folders; None if it has them in one."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    parts, renamed = dict[str, tuple[str, ...]](), dict[str, str]()
    for one in (get_checkpoint_conversion_mapping(kind) if kind else None) or []:
        if isinstance(one, WeightConverter):
            whole = one.target_patterns[0].rpartition(".")[2]
            parts[whole] = tuple(source.split(".")[-2] for source in one.source_patterns)
        elif isinstance(one, WeightRenaming):
            renamed |= zip(one.target_patterns, one.source_patterns, strict=True)
    known = [(len(parts.get(name, ())), name) for name in (GATE_UP, DOWN)] == [(2, GATE_UP), (1, DOWN)]
    return _Names(parts, renamed) if known else None

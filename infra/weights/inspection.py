"""Hashes of tensors, and whether they are numbers, in one pass on several threads; and copies of them.

tensor ──► piece ──► in the type that is published ──► finite? ──► hash      a piece fits into a cache
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from infra import choices
from infra.weights import spent
from infra.weights.bits import Bits, bits_of
from infra.weights.digest import TensorHash, root_digest

_PIECE = 1 << 18  # elements: a smaller one has threads wait for the interpreter's lock
_ALONE = 1 << 14  # elements that torch converts without threads of its own: these are threads already
_SMALL = 1 << 22  # elements of a model for which threads take longer to begin than one takes for it all
_MOST_THREADS = 8  # more find the memory busy


@dataclass(frozen=True)
class Inspected:
    """What was found."""

    digests: Mapping[str, str]
    wrong: str  # a tensor that is not all numbers; empty if there is none

    @property
    def root(self) -> str:
        """The hash over all."""
        return root_digest(self.digests)


def threads() -> int:
    """As many as there are cores, when somebody waits for what they do."""
    return min(_MOST_THREADS, choices.cores())


def inspected(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Inspected:
    """Look at tensors on a CPU, as they are or as they would be in another type."""
    order = sorted(tensors, key=lambda name: -tensors[name].numel())  # the large ones first: all end together
    if sum(tensor.numel() for tensor in tensors.values()) < _SMALL:
        found = {name: inspect(tensors[name], dtype) for name in order}
    else:
        with ThreadPoolExecutor(threads(), thread_name_prefix="hash") as pool:
            found = dict(zip(order, pool.map(lambda name: inspect(tensors[name], dtype), order), strict=True))
    wrong = next((name for name in tensors if not found[name][1]), "")
    return Inspected({name: found[name][0] for name in tensors}, wrong)


@spent.counted()
def inspect(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[str, bool]:
    """One tensor's hash, and whether it is finite."""
    plain = tensor.detach().contiguous().view(-1)
    kind = bits_of(plain[:0].to(dtype or tensor.dtype)).dtype
    hashed, finite = TensorHash(kind, tensor.shape), True
    for piece in _pieces(plain, dtype or tensor.dtype):
        finite = finite and piece.finite()
        hashed.update(piece.raw)
    return hashed.hexdigest(), finite


def _pieces(plain: torch.Tensor, dtype: torch.dtype) -> Iterator[Bits]:
    """Its elements in a type; a piece is written over by the next one."""
    if plain.dtype == dtype:
        bits = bits_of(plain)
        every = range(0, bits.data.size, _PIECE)
        yield from (Bits(bits.dtype, bits.shape, bits.data[at : at + _PIECE]) for at in every)
        return
    room = torch.empty(min(_PIECE, plain.numel()), dtype=dtype)
    for part in plain.split(_PIECE):
        convert(part, room[: part.numel()])
        yield bits_of(room[: part.numel()])


def convert(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a flat tensor into one of any type, in this thread alone."""
    if source.dtype == target.dtype:
        bits_of(target).data[...] = bits_of(source).data
        return
    if (source.dtype, target.dtype) == (torch.float32, torch.bfloat16) and choices.compiles():
        from infra.weights.loops import to_bf16

        to_bf16(bits_of(source).data, bits_of(target).data)
        return
    for some, room in zip(source.split(_ALONE), target.split(_ALONE), strict=True):
        room.copy_(some)

"""Hashes tensors and checks that they are finite, in one pass on several threads. Also converts tensors.

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

_PIECE = 1 << 18  # elements: with smaller pieces, threads wait for the interpreter's lock
_ALONE = 1 << 14  # elements: torch converts no more without starting threads of its own
_SMALL = 1 << 22  # elements: for a smaller model, starting threads takes longer than the work
_MOST_THREADS = 8  # more would wait for memory


@dataclass(frozen=True)
class Inspected:
    """The hashes of tensors, and whether all of them are finite."""

    digests: Mapping[str, str]  # hash of each tensor, by name
    wrong: str  # name of a tensor with NaN or infinity; empty if there is none

    @property
    def root(self) -> str:
        """The root over all tensors."""
        return root_digest(self.digests)


def threads() -> int:
    """Return how many threads to use for work that somebody waits for: one per core, up to a limit."""
    return min(_MOST_THREADS, choices.cores())


def inspected(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Inspected:
    """Hash and check tensors as they are; or on a CPU as they would be in type `dtype`."""
    if dtype is None and tensors and all(tensor.is_cuda for tensor in tensors.values()):
        from infra.weights.gpu_inspection import inspected_there

        return _inspected(inspected_there(tensors, threads()))
    order = sorted(tensors, key=lambda name: -tensors[name].numel())  # largest first: threads end together
    if sum(tensor.numel() for tensor in tensors.values()) < _SMALL:
        found = {name: inspect(tensors[name], dtype) for name in order}
    else:
        with ThreadPoolExecutor(threads(), thread_name_prefix="hash") as pool:
            found = dict(zip(order, pool.map(lambda name: inspect(tensors[name], dtype), order), strict=True))
    return _inspected({name: found[name] for name in tensors})


def _inspected(found: Mapping[str, tuple[str, bool]]) -> Inspected:
    wrong = next((name for name, (_, finite) in found.items() if not finite), "")
    return Inspected({name: digest for name, (digest, _) in found.items()}, wrong)


@spent.counted()
def inspect(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[str, bool]:
    """Return one tensor's hash, and whether it is finite, as it is or as it would be in type `dtype`."""
    plain = tensor.detach().contiguous().view(-1)
    kind = bits_of(plain[:0].to(dtype or tensor.dtype)).dtype
    hashed, finite = TensorHash(kind, tensor.shape), True
    for piece in _pieces(plain, dtype or tensor.dtype):
        finite = finite and piece.finite()
        hashed.update(piece.raw)
    return hashed.hexdigest(), finite


def _pieces(plain: torch.Tensor, dtype: torch.dtype) -> Iterator[Bits]:
    """Yield a flat tensor's elements in a type. Each piece may be overwritten by the next one."""
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
    """Copy a flat tensor into another one, which may be of any type, in this thread alone."""
    if source.dtype == target.dtype:
        bits_of(target).data[...] = bits_of(source).data
        return
    if (source.dtype, target.dtype) == (torch.float32, torch.bfloat16) and choices.compiles():
        from infra.weights.loops import to_bf16

        to_bf16(bits_of(source).data, bits_of(target).data)
        return
    for some, room in zip(source.split(_ALONE), target.split(_ALONE), strict=True):
        room.copy_(some)

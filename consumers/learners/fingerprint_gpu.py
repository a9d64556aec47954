"""The digest of vectors that lie on a GPU, computed there: to bring them over would take longer than a step.

    bytes ──► a sum of 64 bytes for each 1,024, as XXH3 adds them up ──► the same of the sums, and so on

The last few are hashed on the processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from xxhash import xxh3_64

from infra.weights.codec.gpu_hash import block_sums

_BLOCK = 1024  # bytes
_STAGED = 256 << 20  # bytes that are laid end to end at a time
_FEW = 1 << 20  # bytes


def digest_there(every: Iterable[torch.Tensor], size: int, device: torch.device) -> int:
    """Return the digest of the bytes of flat tensors, end to end. `size`: how many bytes these are."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    sums = torch.cat([none, *(block_sums(block) for block in _blocks(every, size, device))])
    while sums.numel() * 8 > _FEW:
        sums = block_sums(torch.cat([sums, sums.new_zeros(-sums.numel() % (_BLOCK // 8))]))
    hashed = xxh3_64(sums.cpu().numpy())
    hashed.update(str(size).encode())
    return hashed.intdigest()


def _blocks(every: Iterable[torch.Tensor], total: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield all bytes, end to end, as 64-bit words of whole blocks; the same memory is used again."""
    size = min(_STAGED, -(-max(1, total) // _BLOCK) * _BLOCK)
    staged = torch.zeros(size, dtype=torch.uint8, device=device)
    there = 0
    for one in every:
        raw = one.view(torch.uint8)
        while raw.numel():
            piece = raw[: size - there]
            staged[there : there + piece.numel()] = piece
            there, raw = there + piece.numel(), raw[piece.numel() :]
            if there == size:
                yield staged.view(torch.int64)
                there = 0
    if there:
        staged[there:] = 0
        yield staged[: -(-there // _BLOCK) * _BLOCK].view(torch.int64)

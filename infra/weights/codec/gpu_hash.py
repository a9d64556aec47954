"""XXH3 of tiles that lie on a GPU: the numbers of `tile_hash`, without bringing the tiles to the processor.

    blocks of 1,024 bytes ──► a sum of each ──► a chain through each tile ──► with the bytes behind: hash

All sums are made at once. Only the chain goes one after the other, over a sixteenth of the bytes, and each
tile has its own. XXH3 has another way for up to 240 bytes: such tiles are brought over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton

from infra.weights.arrays import Array
from infra.weights.codec import gpu_kernels
from infra.weights.codec.tiles import TileHash
from infra.weights.gpu_transfer import uploaded

_BLOCK, _STRIPE = 1024, 64  # bytes
_SHORT = 240  # bytes
_AT_ONCE = 8  # blocks of a program
_CHAINED = 16  # sums of a tile that are loaded together
_PRIME_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME_64 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip
_BEGIN = (_PRIME_32[2], *_PRIME_64[:4], _PRIME_32[1], _PRIME_64[4], _PRIME_32[0])
_FACTORS = (_PRIME_32[0], _PRIME_64[0], 0x165667919E3779F9)
# The secret of XXH3 where none is given.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LAST, _MERGED = len(_SECRET) - _STRIPE - 7, 11  # where the secrets of the last stripe and of the end begin


class QueuedHashes:
    """The hashes of tiles, which the GPU is making. `parts` are to be brought over, and `told` reads them."""

    def __init__(self, flat: torch.Tensor, starts: Array, sizes: Array) -> None:
        """`flat` has whole blocks of bytes; each tile starts with a block. Both are told in bytes."""
        self._sizes = sizes
        self._long, self._short = np.flatnonzero(sizes > _SHORT), np.flatnonzero(sizes <= _SHORT)
        raw = flat.view(torch.uint8)
        hashes = torch.zeros(self._long.size, dtype=torch.int64, device=flat.device)
        if self._long.size:
            words, table = raw.view(torch.int64), _table(flat.device)
            sums = block_sums(words)
            where = uploaded(
                flat.device, starts[self._long].astype(np.int64), sizes[self._long].astype(np.int64)
            )
            gpu_kernels.launch(
                gpu_kernels.hash_kernel, self._long.size, words, raw, sums, *where, table, hashes,
                at_once=_CHAINED, num_warps=1,
            )  # fmt: skip
        self.parts = [hashes]
        if self._short.size:
            places = starts[self._short, None] + np.arange(_SHORT)
            (there,) = uploaded(flat.device, places.clip(max=raw.numel() - 1).astype(np.int64))
            self.parts.append(raw[there])

    def told(self, hashes: Array, short: Array | None = None) -> list[int]:
        """Return the hash of each tile, from `parts` in main memory."""
        found = np.empty(self._sizes.size, np.uint64)
        found[self._long] = hashes.view(np.uint64)
        if short is not None:
            rows: Sequence[Array] = list(short.reshape(-1, _SHORT))
            for number, row in zip(self._short.tolist(), rows, strict=True):
                found[number] = TileHash(row[: self._sizes[number]].tobytes()).intdigest()
        told: list[int] = found.tolist()
        return told


def block_sums(words: torch.Tensor) -> torch.Tensor:
    """Return eight sums of each block, end to end; `words` has whole blocks, as 64-bit numbers."""
    blocks = words.numel() * 8 // _BLOCK
    sums = torch.empty(blocks * 8, dtype=torch.int64, device=words.device)
    gpu_kernels.launch(
        gpu_kernels.sums_kernel, triton.cdiv(blocks, _AT_ONCE), words, _table(words.device), sums, blocks,
        blocks=_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return sums


@cache
def _table(device: torch.device) -> torch.Tensor:
    """Return the numbers of XXH3 as the kernels take them."""
    parts = [_SECRET[_LAST : _LAST + _STRIPE], _SECRET[_MERGED : _MERGED + _STRIPE]]
    words = [np.frombuffer(part, np.uint64) for part in (_SECRET[:192], *parts)]
    numbers = np.concatenate([*words, np.array([*_BEGIN, *_FACTORS], np.uint64)])
    return torch.from_numpy(numbers.view(np.int64)).to(device)

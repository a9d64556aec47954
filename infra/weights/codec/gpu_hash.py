"""XXH3 of tiles that lie on a GPU: the numbers of `tile_hash`, without bringing the tiles to the processor.

    blocks of 1,024 bytes ──► a sum of each ──► a chain through each tile ──► with the bytes behind: hash

All sums are made at once. Only the chain goes one after the other, over a sixteenth of the bytes, and each
tile has its own. Sums and chains are made on the GPU, the rest here. XXH3 has another way for up to 240
bytes: such tiles are brought over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton

from infra.weights.arrays import Array
from infra.weights.codec import gpu_kernels
from infra.weights.codec.tiles import TileHash

_BLOCK, _STRIPE = 1024, 64  # bytes
_SHORT = 240  # bytes
_AT_ONCE = 8  # blocks of a program
_MASK = (1 << 64) - 1
_LOW = np.uint64((1 << 32) - 1)
_SWAPPED = [lane ^ 1 for lane in range(8)]
_PRIME_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME_64 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip
_BEGIN = (_PRIME_32[2], *_PRIME_64[:4], _PRIME_32[1], _PRIME_64[4], _PRIME_32[0])
# The secret of XXH3 where none is given.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def tile_hashes(flat: torch.Tensor, starts: Array, sizes: Array) -> list[int]:
    """Return the hashes of tiles in `flat`, which has whole blocks of bytes; a tile starts with a block."""
    long = np.flatnonzero(sizes > _SHORT).tolist()
    made = _long(flat, starts[long], sizes[long]) if long else []
    found = dict(zip(long, made, strict=True))
    for number, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        if number not in found:
            found[number] = TileHash(flat[start : start + size].cpu().numpy().data).intdigest()
    return [found[number] for number in range(len(sizes))]


def _long(flat: torch.Tensor, starts: Array, sizes: Array) -> list[int]:
    blocks = (sizes - 1) // _BLOCK
    rest, ends = starts + blocks * _BLOCK, starts + sizes
    # The bytes behind a tile's blocks, and its last stripe, which may begin in a block.
    places = [rest[:, None] + np.arange(_BLOCK), ends[:, None] + np.arange(-_STRIPE, 0)]
    found = _there(np.concatenate(places, axis=1).clip(max=flat.numel() - 1), flat)
    behind = flat[found].cpu().numpy()
    lanes = _chained(flat, starts // _BLOCK, blocks)
    stripes = (sizes - 1) % _BLOCK // _STRIPE
    for number in range(_BLOCK // _STRIPE - 1):
        more = number < stripes
        lanes[more] = _with(lanes[more], behind[more, number * _STRIPE :][:, :_STRIPE], 8 * number)
    lanes = _with(lanes, behind[:, _BLOCK:], len(_SECRET) - _STRIPE - 7)
    return [_merged(one, size) for one, size in zip(lanes.tolist(), sizes.tolist(), strict=True)]


def _chained(flat: torch.Tensor, first: Array, blocks: Array) -> Array:
    """Return the lanes of each tile behind its blocks, of which it has so many from the first on."""
    secret, sums = _there(np.frombuffer(_SECRET, np.int64), flat), block_sums(flat.view(torch.int64))
    lanes = _there(np.tile(np.array(_BEGIN, np.uint64).view(np.int64), (blocks.size, 1)), flat)
    gpu_kernels.chain_kernel[(blocks.size,)](
        sums, _there(first, flat), _there(blocks, flat), secret, lanes, prime=_PRIME_32[0]
    )
    found: Array = lanes.cpu().numpy().view(np.uint64)
    return found


def block_sums(words: torch.Tensor) -> torch.Tensor:
    """Return eight sums of each block, end to end; `words` has whole blocks, as 64-bit numbers."""
    secret, count = _there(np.frombuffer(_SECRET, np.int64), words), words.numel() * 8 // _BLOCK
    sums = words.new_empty(count * 8)
    gpu_kernels.sums_kernel[(triton.cdiv(count, _AT_ONCE),)](words, secret, sums, count, blocks=_AT_ONCE)
    return sums


def _there(numbers: Array, flat: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(numbers.copy()).to(flat.device)


def _with(lanes: Array, stripes: Array, at: int) -> Array:
    """Return lanes with a stripe added to each; `at` is where its secret begins."""
    data = np.ascontiguousarray(stripes).view(np.uint64)
    key = data ^ np.frombuffer(_SECRET[at : at + _STRIPE], np.uint64)
    found: Array = lanes + data[:, _SWAPPED] + (key & _LOW) * (key >> np.uint64(32))
    return found


def _merged(lanes: Sequence[int], size: int) -> int:
    """Return the hash of a tile of so many bytes, from its lanes."""
    keys = np.frombuffer(_SECRET[11 : 11 + _STRIPE], np.uint64).tolist()
    mixed = [lane ^ key for lane, key in zip(lanes, keys, strict=True)]
    found = size * _PRIME_64[0]
    for one, other in zip(mixed[::2], mixed[1::2], strict=True):
        product = one * other
        found += (product & _MASK) ^ (product >> 64)
    found &= _MASK
    found = (found ^ (found >> 37)) * 0x165667919E3779F9 & _MASK
    return found ^ (found >> 32)

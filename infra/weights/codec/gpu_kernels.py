"""The kernels of the codec on a GPU, in Triton.

A run's tiles lie one behind the other, each filled up to whole pages of 1,024 elements, which are four blocks
each. How many elements of each band a block has is counted for all blocks; only where an element changes are
the elements of its block looked at one by one. `before` has, by band and block, how many elements of the band
the blocks before have, in all tiles; `edges` has each band's lowest exponent, and one above the last band's.

Numbers are 32 bits wide, and wrap. Arguments have no annotations: Triton reads them, and knows no `Any`.
Counts that vary from run to run are not specialized, or each would be compiled anew.
"""

from __future__ import annotations

import threading
from typing import Any

import triton
import triton.language as tl

PAGE_ELEMENTS = tl.constexpr(1024)
BLOCK_ELEMENTS = tl.constexpr(256)
_BLOCKS = tl.constexpr(4)  # of a page
# What a table of 64-bit numbers for XXH3 has, after the 24 words of the secret.
LAST_SECRET = tl.constexpr(24)  # the secret of a tile's last stripe
MERGED_SECRET = tl.constexpr(32)  # the secret of the end
FIRST_LANES = tl.constexpr(40)  # how the lanes begin
FACTORS = tl.constexpr(48)  # three primes: of the chain, of a tile's size, of the end

_launching = threading.Lock()  # Triton does not say that threads may compile one kernel at a time


def launch(kernel: Any, programs: int, *given: Any, **constants: int) -> None:
    """Start so many programs of a kernel on this thread's stream."""
    with _launching:
        kernel[(programs,)](*given, **constants)


@triton.jit
def _bits(data, at, there, whole: tl.constexpr):
    return tl.load(data + at, there, 0).to(tl.int32) & whole


@triton.jit
def _exponents(data, at, there, fraction: tl.constexpr, most: tl.constexpr):
    return (tl.load(data + at, there, 0).to(tl.int32) >> fraction) & most


@triton.jit
def _members(data, block, there, low, high, fraction: tl.constexpr, most: tl.constexpr):
    """Return which elements of some blocks have exponents from `low` to below `high`."""
    at = block[:, None] * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]
    found = _exponents(data, at, there[:, None], fraction, most)
    return (found >= low[:, None]) & (found < high[:, None])


@triton.jit
def _ordered(bits, sign: tl.constexpr, whole: tl.constexpr):
    return bits ^ tl.where((bits & sign) != 0, whole, sign)


@triton.jit
def moved_kernel(old, new, owner, ends, moved):
    """Count each page's elements that change."""
    page = tl.program_id(0)
    at = page * PAGE_ELEMENTS + tl.arange(0, PAGE_ELEMENTS)
    there = at < tl.load(ends + tl.load(owner + page))
    was, now = tl.load(old + at, there, 0), tl.load(new + at, there, 0)
    tl.store(moved + page, tl.sum((was != now).to(tl.int32), 0))


@triton.jit
def places_kernel(old, new, owner, ends, behind, places):
    """Write out where elements change, in order. `behind` has the changes up to each page's end."""
    page = tl.program_id(0)
    at = page * PAGE_ELEMENTS + tl.arange(0, PAGE_ELEMENTS)
    there = at < tl.load(ends + tl.load(owner + page))
    moves = tl.load(old + at, there, 0) != tl.load(new + at, there, 0)
    number = moves.to(tl.int32)
    slot = tl.load(behind + page) - tl.sum(number, 0) + tl.cumsum(number, 0) - 1
    tl.store(places + slot, at, moves)


@triton.jit(do_not_specialize=["blocks", "bands"])
def counts_kernel(
    data, owner, ends, edges, counts, blocks, bands, fraction: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    """Count each block's elements by band. The first place of `counts` is left, so that sums have a zero."""
    page = tl.program_id(0)
    at = (
        page * PAGE_ELEMENTS
        + tl.arange(0, _BLOCKS)[:, None] * BLOCK_ELEMENTS
        + tl.arange(0, BLOCK_ELEMENTS)[None, :]
    )
    there = at < tl.load(ends + tl.load(owner + page))
    exponent = _exponents(data, at, there, fraction, most)
    to = counts + 1 + page * _BLOCKS + tl.arange(0, _BLOCKS)
    for band in range(bands):
        low, high = tl.load(edges + band), tl.load(edges + band + 1)
        mine = there & (exponent >= low) & (exponent < high)
        tl.store(to + band * blocks, tl.sum(mine.to(tl.int32), 1))


@triton.jit(do_not_specialize=["blocks", "bands", "total"])
def changes_kernel(
    old, new, places, owner, first, table, edges, before, ranks, codes, keys, blocks, bands, total,
    fraction: tl.constexpr, most: tl.constexpr, sign: tl.constexpr, whole: tl.constexpr, top: tl.constexpr,
    at_once: tl.constexpr,
):  # fmt: skip
    """Find the changes' places in their bands, their steps, and the tile and band that they belong to."""
    k = tl.program_id(0) * at_once + tl.arange(0, at_once)
    mine = k < total
    at = tl.load(places + k, mine, 0)
    tile = tl.load(owner + at // PAGE_ELEMENTS)
    was, now = _bits(old, at, mine, whole), _bits(new, at, mine, whole)
    band = tl.load(table + ((was >> fraction) & most)).to(tl.int32)
    low, high = tl.load(edges + band), tl.load(edges + band + 1)
    block = at // BLOCK_ELEMENTS
    earlier = tl.arange(0, BLOCK_ELEMENTS)[None, :] < (at % BLOCK_ELEMENTS)[:, None]
    alike = _members(old, block, mine, low, high, fraction, most) & earlier
    own = before + band * blocks
    above = tl.load(own + block) - tl.load(own + tl.load(first + tile) * _BLOCKS)
    step = (_ordered(now, sign, whole) - _ordered(was, sign, whole)) & whole
    code = ((step << 1) & whole) ^ tl.where(((step >> top) & 1) != 0, whole, 0)
    tl.store(ranks + k, above + tl.sum(alike.to(tl.int32), 1), mine)
    tl.store(codes + k, code.to(codes.dtype.element_ty), mine)
    tl.store(keys + k, tile * bands + band, mine)


@triton.jit(do_not_specialize=["total"])
def gaps_kernel(keys, order, ranks, codes, gaps, steps, total, at_once: tl.constexpr):
    """Put changes in order, by tile and band, and turn their places into gaps."""
    k = tl.program_id(0) * at_once + tl.arange(0, at_once)
    mine, follows = k < total, (k < total) & (k > 0)
    follows = follows & (tl.load(keys + k, mine, 0) == tl.load(keys + k - 1, follows, -1))
    own, other = tl.load(order + k, mine, 0), tl.load(order + k - 1, follows, 0)
    last = tl.where(follows, tl.load(ranks + other), -1)
    tl.store(gaps + k, tl.load(ranks + own) - last - 1, mine)
    tl.store(steps + k, tl.load(codes + own), mine)


@triton.jit(do_not_specialize=["blocks", "tiles", "total", "halvings"])
def apply_kernel(
    data, made, wrong, segments, begins, behind, codes, first, edges, before, blocks, tiles, total, halvings,
    fraction: tl.constexpr, most: tl.constexpr, sign: tl.constexpr, whole: tl.constexpr, top: tl.constexpr,
    at_once: tl.constexpr,
):  # fmt: skip
    """Move the elements that change, from `data` to `made`; note the tiles that have no such element.

    A change's segment is its band and tile; `begins` has each segment's first change, `behind` sums of all
    gaps and changes up to each change.
    """
    k = tl.program_id(0) * at_once + tl.arange(0, at_once)
    mine = k < total
    segment = tl.load(segments + k, mine, 0).to(tl.int32)
    band, tile = segment // tiles, segment % tiles
    begin = tl.load(begins + segment)
    rank = tl.load(behind + k, mine, 1) - 1 - tl.load(behind + begin - 1, mine & (begin > 0), 0)
    own = before + band * blocks
    block, past = tl.load(first + tile) * _BLOCKS, tl.load(first + tile + 1) * _BLOCKS
    start = tl.load(own + block)
    fits = mine & (rank < (tl.load(own + past) - start).to(tl.int64))
    tl.store(wrong + tile, 1, mine & (fits == 0))
    target = start + tl.where(fits, rank, 0).to(tl.int32)
    for _ in range(halvings):  # the last block of the tile before which there are no more than `target`
        middle = (block + past) // 2
        right = tl.load(own + middle) <= target
        block, past = tl.where(right, middle, block), tl.where(right, past, middle)
    low, high = tl.load(edges + band), tl.load(edges + band + 1)
    alike = _members(data, block, fits, low, high, fraction, most)
    seen = tl.cumsum(alike.to(tl.int32), 1)
    inner = tl.sum((seen <= (target - tl.load(own + block))[:, None]).to(tl.int32), 1)
    at = block * BLOCK_ELEMENTS + inner
    bits = _bits(data, at, fits, whole)
    code = tl.load(codes + k, mine, 0).to(tl.int32) & whole
    half: tl.constexpr = (1 << top) - 1
    step = ((code >> 1) & half) ^ tl.where((code & 1) != 0, whole, 0)
    place = (_ordered(bits, sign, whole) + step) & whole
    moved = tl.where(sign != 0, place ^ tl.where((place & sign) != 0, sign, whole), place)
    tl.store(made + at, moved.to(made.dtype.element_ty), fits)


@triton.jit(do_not_specialize=["count"])
def sums_kernel(data, table, sums, count, blocks: tl.constexpr):
    """Add up each 1,024 bytes as XXH3 does: eight lanes, over sixteen stripes."""
    block = (tl.program_id(0) * blocks + tl.arange(0, blocks))[:, None, None]
    stripe, lane = tl.arange(0, 16)[None, :, None], tl.arange(0, 8)[None, None, :]
    there = block < count
    at = data + block.to(tl.int64) * 128 + stripe * 8
    key = tl.load(at + lane, there, 0) ^ tl.load(table + stripe + lane)
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    total = tl.sum(low * high + tl.load(at + (lane ^ 1), there, 0), 1)
    of = (tl.program_id(0) * blocks + tl.arange(0, blocks))[:, None]
    tl.store(sums + of.to(tl.int64) * 8 + tl.arange(0, 8)[None, :], total, of < count)


@triton.jit
def _last_words(raw, lane):
    """Return words of 64 bits that may begin at any byte."""
    byte = tl.arange(0, 8)[None, :]
    each = tl.load(raw + lane[:, None] * 8 + byte).to(tl.int64) & 0xFF
    return tl.sum(each << (8 * byte).to(tl.int64), 1)


@triton.jit
def _with(total, words, swapped, key):
    key = words ^ key
    return total + swapped + (key & 0xFFFFFFFF) * ((key >> 32) & 0xFFFFFFFF)


@triton.jit
def hash_kernel(data, raw, sums, starts, sizes, table, hashes, at_once: tl.constexpr):
    """Chain the sums of a tile's blocks, add the bytes behind them, and make one number of all."""
    tile, lane = tl.program_id(0), tl.arange(0, 8)
    start, size = tl.load(starts + tile), tl.load(sizes + tile)
    blocks = (size - 1) // 1024
    total, key, prime = (
        tl.load(table + FIRST_LANES + lane),
        tl.load(table + 16 + lane),
        tl.load(table + FACTORS),
    )
    at = sums + (start // 1024) * 8 + lane
    for first in range(0, blocks, at_once):  # loads are started together: each takes longer than its step
        for n in tl.static_range(at_once):
            there = first + n < blocks
            more = total + tl.load(at + (first + n) * 8, there, 0)
            total = tl.where(there, (more ^ ((more >> 47) & 0x1FFFF) ^ key) * prime, total)
    rest = data + (start // 8 + blocks * 128)
    for n in range((size - 1) % 1024 // 64):
        words, swapped = tl.load(rest + n * 8 + lane), tl.load(rest + n * 8 + (lane ^ 1))
        total = _with(total, words, swapped, tl.load(table + n + lane))
    last = raw + (start + size - 64)
    total = _with(
        total, _last_words(last, lane), _last_words(last, lane ^ 1), tl.load(table + LAST_SECRET + lane)
    )
    pairs, side = tl.reshape(total ^ tl.load(table + MERGED_SECRET + lane), (4, 2)), tl.arange(0, 2)[None, :]
    one, other = tl.sum(tl.where(side == 0, pairs, 0), 1), tl.sum(tl.where(side == 1, pairs, 0), 1)
    high = tl.umulhi(one.to(tl.uint64, bitcast=True), other.to(tl.uint64, bitcast=True))
    found = size * tl.load(table + FACTORS + 1)
    found += tl.sum((one * other) ^ high.to(tl.int64, bitcast=True), 0)
    found = (found ^ ((found >> 37) & 0x7FFFFFF)) * tl.load(table + FACTORS + 2)
    tl.store(hashes + tile, found ^ ((found >> 32) & 0xFFFFFFFF))

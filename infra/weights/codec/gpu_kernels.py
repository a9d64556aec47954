"""The kernels of `scan_gpu.py` and `gpu_hash.py`, in Triton.

A run's tiles lie one behind the other, each filled up to whole blocks. A block is rows of 32 elements. An
element's place in its band is a sum over the elements before it: in its row, by counters of six bits, ten of
which share a word; over the rows before, by the rows' sums; over the blocks before, by `before`.

Numbers are 32 bits wide, and wrap. Arguments have no annotations: Triton reads them, and knows no `Any`.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW = tl.constexpr(32)
_PER_WORD = tl.constexpr(10)  # bands
_COUNTER = tl.constexpr(6)  # bits: a row has at most 32 elements of a band
_LOW = tl.constexpr((1 << 6) - 1)


@triton.jit
def _places(held, rows: tl.constexpr):
    """Return the places of a program's elements, and whether they are in the tile."""
    block = tl.program_id(0)
    inner = tl.arange(0, rows)[:, None] * ROW + tl.arange(0, ROW)[None, :]
    return block * (rows * ROW) + inner, inner < tl.load(held + block)


@triton.jit
def _bits(data, at, there, whole: tl.constexpr):
    return tl.load(data + at, there, 0).to(tl.int32) & whole


@triton.jit
def _band(bits, table, fraction: tl.constexpr, most: tl.constexpr):
    return tl.load(table + ((bits >> fraction) & most)).to(tl.int32)


@triton.jit
def _packed(band, there, first: tl.constexpr):
    """Return which elements are of a word's bands, where their counters begin, and a one in each."""
    mine = there & (band >= first) & (band < first + _PER_WORD)
    shift = tl.where(mine, (band - first) * _COUNTER, 0).to(tl.int64)
    return mine, shift, mine.to(tl.int64) << shift


@triton.jit
def _ordered(bits, sign: tl.constexpr, whole: tl.constexpr):
    return bits ^ tl.where((bits & sign) != 0, whole, sign)


@triton.jit
def _ranks(band, there, before, n_bands: tl.constexpr, rows: tl.constexpr):
    """Return how many elements of its band are before each element; those of other blocks are in `before`."""
    own = before + tl.program_id(0) * n_bands
    rank = tl.zeros((rows, ROW), tl.int32)
    for first in tl.static_range(0, n_bands, _PER_WORD):
        mine, shift, one = _packed(band, there, first)
        in_row = ((tl.cumsum(one, 1) >> shift) & _LOW).to(tl.int32) - 1
        rank = tl.where(mine, in_row, rank)
        of_row = tl.sum(one, 1)
        for b in tl.static_range(_PER_WORD):
            if first + b < n_bands:
                count = ((of_row >> (b * _COUNTER)) & _LOW).to(tl.int32)
                above = tl.cumsum(count, 0) - count + tl.load(own + first + b)
                rank = tl.where(band == first + b, rank + above[:, None], rank)
    return rank


@triton.jit
def counts_kernel(
    old, new, table, held, counts, moved, fraction: tl.constexpr, most: tl.constexpr, whole: tl.constexpr,
    n_bands: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Count each block's elements by band, and those that change."""
    at, there = _places(held, rows)
    was, now = _bits(old, at, there, whole), _bits(new, at, there, whole)
    band = _band(was, table, fraction, most)
    tl.store(moved + tl.program_id(0), tl.sum((was != now).to(tl.int32)))
    for first in tl.static_range(0, n_bands, _PER_WORD):
        of_row = tl.sum(_packed(band, there, first)[2], 1)
        for b in tl.static_range(_PER_WORD):
            if first + b < n_bands:
                count = ((of_row >> (b * _COUNTER)) & _LOW).to(tl.int32)
                tl.store(counts + tl.program_id(0) * n_bands + first + b, tl.sum(count))


@triton.jit
def changes_kernel(
    old, new, table, held, before, where, ranks, steps, bands, fraction: tl.constexpr, most: tl.constexpr,
    sign: tl.constexpr, whole: tl.constexpr, top: tl.constexpr, n_bands: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Write out the elements that change, in order: their places in their bands, steps and bands."""
    at, there = _places(held, rows)
    was, now = _bits(old, at, there, whole), _bits(new, at, there, whole)
    band = _band(was, table, fraction, most)
    rank = _ranks(band, there, before, n_bands, rows)
    step = (_ordered(now, sign, whole) - _ordered(was, sign, whole)) & whole
    code = ((step << 1) & whole) ^ tl.where(((step >> top) & 1) != 0, whole, 0)
    moves = was != now
    of_row = tl.sum(moves.to(tl.int32), 1)
    above = tl.cumsum(of_row, 0) - of_row + tl.load(where + tl.program_id(0))
    slot = above[:, None] + tl.cumsum(moves.to(tl.int32), 1) - 1
    tl.store(ranks + slot, rank, moves)
    tl.store(steps + slot, code.to(steps.dtype.element_ty), moves)
    tl.store(bands + slot, band.to(bands.dtype.element_ty), moves)


@triton.jit
def apply_kernel(
    data, to, table, held, before, codes, fraction: tl.constexpr, most: tl.constexpr, sign: tl.constexpr,
    whole: tl.constexpr, top: tl.constexpr, n_bands: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Move each element by the step that lies at its place in its band; `before` begins in `codes`."""
    at, there = _places(held, rows)
    bits = _bits(data, at, there, whole)
    rank = _ranks(_band(bits, table, fraction, most), there, before, n_bands, rows)
    code = tl.load(codes + rank, there, 0).to(tl.int32) & whole
    half: tl.constexpr = (1 << top) - 1
    step = ((code >> 1) & half) ^ tl.where((code & 1) != 0, whole, 0)
    place = (_ordered(bits, sign, whole) + step) & whole
    made = tl.where(sign != 0, place ^ tl.where((place & sign) != 0, sign, whole), place)
    tl.store(to + at, made.to(to.dtype.element_ty), there)


@triton.jit
def sums_kernel(data, secret, sums, count, blocks: tl.constexpr):
    """Add up each block of 1,024 bytes as XXH3 does: eight lanes, over sixteen stripes."""
    block = (tl.program_id(0) * blocks + tl.arange(0, blocks))[:, None, None]
    stripe, lane = tl.arange(0, 16)[None, :, None], tl.arange(0, 8)[None, None, :]
    there = block < count
    at = data + block.to(tl.int64) * 128 + stripe * 8
    key = tl.load(at + lane, there, 0) ^ tl.load(secret + stripe + lane)
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    total = tl.sum(low * high + tl.load(at + (lane ^ 1), there, 0), 1)
    of = (tl.program_id(0) * blocks + tl.arange(0, blocks))[:, None]
    tl.store(sums + of.to(tl.int64) * 8 + tl.arange(0, 8)[None, :], total, of < count)


@triton.jit
def chain_kernel(sums, first, count, secret, lanes, prime: tl.constexpr):
    """Chain the sums of a tile's blocks. `lanes` holds how they begin, and then how they end."""
    tile, lane = tl.program_id(0), tl.arange(0, 8)
    key = tl.load(secret + 16 + lane)
    total = tl.load(lanes + tile * 8 + lane)
    at = sums + tl.load(first + tile) * 8 + lane
    for _ in range(tl.load(count + tile)):
        total += tl.load(at)
        total = (total ^ ((total >> 47) & 0x1FFFF) ^ key) * prime
        at += 8
    tl.store(lanes + tile * 8 + lane, total)

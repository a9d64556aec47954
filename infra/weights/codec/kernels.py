"""The compiled loops of the scan of a tile. Threads share a model's tiles: the interpreter's lock is
released.

A scan goes by blocks of 64 elements. `_classify` makes a mask of a block for each band, with a bit for each
element, by comparing all its exponents with the band's at once. Bits are counted instead of elements, and
only elements that change are looked at one by one. The vectors are LLVM's, which compiles them to what a
processor has.
"""

# All in one file: of a cached function, numba only notices changes in its own file.
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from infra.weights.arrays import Array
from infra.weights.codec.bands import MOST_BANDS
from infra.weights.codec.scan import SAMPLED

BLOCK = 64  # elements: a bit each in a mask
STRETCH = 1 << 16  # elements that are hashed, then scanned while they are in the second cache
LINE = 64  # bytes of the cache's lines
NEVER = np.uint64(0xFFFFFFFFFFFFFFFF)
_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_BYTES, _WORDS = ir.VectorType(_BYTE, BLOCK), ir.VectorType(_WORD, MOST_BANDS)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, vector: Any, at: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


def _all(builder: Any, vector: Any, value: Any) -> Any:
    """Return a vector that has a value in all places."""
    nothing, number = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    first = builder.insert_element(nothing, value, ir.Constant(number, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(number, BLOCK), None))


@intrinsic
def _classify(
    _: Any, data: Any, at: Any, fraction: Any, most: Any, floors: Any, above: Any, seen: Any
) -> Any:
    """Set masks of a block's elements in each band or above; add how many each band has to `seen`."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds, word = signature.args, lambda value: ir.Constant(_WORD, value)
        item = context.get_data_type(kinds[0].dtype)
        vector = ir.VectorType(item, BLOCK)
        bits = builder.load(_pointer(context, builder, kinds[0], args[0], vector, args[1]), align=1)
        exponents = builder.lshr(bits, _all(builder, vector, args[2]))
        if item.width > 8:
            exponents = builder.trunc(exponents, _BYTES)
        exponents = builder.and_(exponents, _all(builder, _BYTES, args[3]))
        for band in range(1, MOST_BANDS):
            floor = _pointer(context, builder, kinds[4], args[4], _BYTES, word(BLOCK * band))
            mask = builder.icmp_unsigned(">", exponents, builder.load(floor, align=1))
            there = _pointer(context, builder, kinds[5], args[5], _WORD, word(band))
            builder.store(builder.bitcast(mask, _WORD), there)
        here = builder.load(_pointer(context, builder, kinds[5], args[5], _WORDS, word(0)), align=8)
        order = ir.Constant(ir.VectorType(ir.IntType(32), MOST_BANDS), list(range(1, MOST_BANDS + 1)))
        next_ = builder.shuffle_vector(here, ir.Constant(_WORDS, [0] * MOST_BANDS), order)
        kind = ir.FunctionType(_WORDS, [_WORDS])
        counted = cgutils.get_or_insert_function(builder.module, kind, f"llvm.ctpop.v{MOST_BANDS}i64")
        sums = _pointer(context, builder, kinds[6], args[6], _WORDS, word(0))
        count = builder.call(counted, [builder.and_(here, builder.not_(next_))])
        builder.store(builder.add(builder.load(sums, align=8), count), sums, align=8)
        return context.get_dummy_value()

    return types.void(data, types.intp, data.dtype, types.uint8, floors, above, seen), made


def _compared(how: str, count: int) -> Any:
    @intrinsic
    def compared(_: Any, one: Any, other: Any, at: Any) -> Any:
        def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = ir.VectorType(context.get_data_type(signature.args[0].dtype), count)
            both = [
                builder.load(_pointer(context, builder, kind, array, vector, args[2]), align=1)
                for kind, array in zip(signature.args[:2], args[:2], strict=True)
            ]
            mask = builder.bitcast(builder.icmp_unsigned(how, *both), ir.IntType(count))
            return mask if count == BLOCK else builder.zext(mask, _WORD)

        return types.uint64(one, other, types.intp), made

    return compared


_differ = _compared("!=", BLOCK)  # mask of the elements that differ
_less = _compared("<", MOST_BANDS)  # mask of the bands in which the first number is less


@intrinsic
def _fetch(_: Any, data: Any, at: Any) -> Any:
    """Bring a block of the next stretch near the processor, while this stretch is worked on."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line, number = _BYTE.as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [line, number, number, number])
        fetched = builder.module.declare_intrinsic("llvm.prefetch", [line], kind)
        first = _pointer(context, builder, signature.args[0], args[0], _BYTE, args[1])
        how = [ir.Constant(number, said) for said in (0, 2, 1)]  # for reading, to the second cache, data
        for at in range(0, BLOCK * context.get_data_type(signature.args[0].dtype).width // 8, LINE):
            builder.call(fetched, [builder.gep(first, [ir.Constant(_WORD, at)]), *how])
        return context.get_dummy_value()

    return types.void(data, types.intp), made


@intrinsic
def _bits(_: Any, mask: Any) -> Any:
    """Return how many bits are set."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), made


@intrinsic
def _first(_: Any, mask: Any) -> Any:
    """Return the place of the lowest bit that is set."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.intp(types.uint64), made


@njit(nogil=True, cache=True)
def _step(old: Any, new: Any, sign: int, whole: int) -> Any:
    """Return by how many places a number moves, as a code: 0, 1, 2, 3, 4 … for 0, -1, 1, -2, 2 …"""
    before, after = np.int64(old), np.int64(new)
    before ^= whole if before & sign else sign
    after ^= whole if after & sign else sign
    step = (after - before) & whole
    return ((2 * step) & whole) ^ (whole if 2 * step > whole else 0)


@njit(nogil=True, cache=True)
def census(
    old: Array, new: Array, fraction: int, most: int, sign: int, whole: int, every: int, found: Array
) -> None:
    """Count elements, changes and the sum of steps, by old exponent, in one of `every` stretches."""
    for at in range(0, old.size, SAMPLED * every):
        for i in range(at, min(at + SAMPLED, old.size)):
            exponent = (old[i] >> fraction) & most
            found[0, exponent] += 1
            if old[i] != new[i]:
                found[1, exponent] += 1
                found[2, exponent] += _step(old[i], new[i], sign, whole)


@njit(nogil=True, cache=True)
def _all_moved(
    old: Array, new: Array, at: int, fraction: int, most: int, sign: int, whole: int, table: Array,
    room: Array, gaps: Array, steps: Array, bands: Array, counts: Array, count: int,
) -> None:  # fmt: skip
    """Record a block of which every element changes: only the first of each band may have a gap."""
    above, seen, ranks = room[0], room[1], room[2]
    for i in range(BLOCK):
        gaps[count + i] = 0
    for i in range(BLOCK):
        steps[count + i] = _step(old[at + i], new[at + i], sign, whole)
    for i in range(BLOCK):
        bands[count + i] = table[(old[at + i] >> fraction) & most]
    for b in range(MOST_BANDS):
        mine = above[b] & ~above[b + 1]
        if mine:
            number = _bits(mine)
            gaps[count + _first(mine)] = seen[b] - number - ranks[b]
            ranks[b] = seen[b]
            counts[b] += np.int64(number)


@njit(nogil=True, cache=True)
def scan(
    old: Array, new: Array, old_behind: Array, new_behind: Array, start: int, end: int, fraction: int,
    most: int, sign: int, whole: int, floors: Array, table: Array, room: Array, gaps: Array, steps: Array,
    bands: Array, counts: Array, count: int,
) -> int:  # fmt: skip
    """Record the changes of a stretch. Returns their number so far; -1 if there is no room for them."""
    above, seen, ranks = room[0], room[1], room[2]  # ranks: each band's elements up to its last change
    for at in range(start, end, BLOCK):
        _fetch(old, at + STRETCH)
        _fetch(new, at + STRETCH)
        if at + BLOCK <= old.size:
            _classify(old, at, fraction, most, floors, above, seen)
            moved = _differ(old, new, at)
        else:
            _classify(old_behind, 0, fraction, most, floors, above, seen)
            moved = _differ(old_behind, new_behind, 0)
        if moved == NEVER and count + BLOCK <= gaps.size:
            _all_moved(
                old, new, at, fraction, most, sign, whole, table, room, gaps, steps, bands, counts, count
            )
            count += BLOCK
            continue
        while moved:
            if count == gaps.size:
                return -1
            bit = _first(moved)
            b = table[(old[at + bit] >> fraction) & most]
            rank = seen[b] - _bits(above[b] & ~above[b + 1] & (NEVER << np.uint64(bit)))
            gaps[count] = rank - ranks[b]
            ranks[b] = rank + np.uint64(1)
            steps[count] = _step(old[at + bit], new[at + bit], sign, whole)
            bands[count] = b
            counts[b] += 1
            count += 1
            moved &= moved - np.uint64(1)
    return count


@njit(nogil=True, cache=True)
def by_band(bands: Array, next_: Array, gaps: Array, steps: Array) -> tuple[Array, Array]:
    """Return gaps and steps, band by band. `next_` is where each band begins, and is overwritten."""
    to_gaps, to_steps = np.empty(bands.size, gaps.dtype), np.empty(bands.size, steps.dtype)
    for i in range(bands.size):
        to = next_[bands[i]]
        to_gaps[to], to_steps[to] = gaps[i], steps[i]
        next_[bands[i]] += 1
    return to_gaps, to_steps


@njit(nogil=True, cache=True)
def apply(
    data: Array, behind: Array, start: int, end: int, fraction: int, most: int, sign: int, whole: int,
    floors: Array, room: Array, upcoming: Array, ends: Array, gaps: Array, steps: Array, places: Array,
    was: Array, done: int,
) -> int:  # fmt: skip
    """Apply changes to a stretch. Returns how many changes have found their element so far."""
    above, seen, ranks = room[0], room[1], room[2]  # ranks: each band's elements before its next change
    for at in range(start, end, BLOCK):
        _fetch(data, at + STRETCH)
        if at + BLOCK <= data.size:
            _classify(data, at, fraction, most, floors, above, seen)
        else:
            _classify(behind, 0, fraction, most, floors, above, seen)
        due = _less(ranks, seen, 0)
        while due:
            b = _first(due)
            mine, left, k = above[b] & ~above[b + 1], seen[b] - ranks[b], upcoming[b]
            stay = _bits(mine) - left  # elements of the band before the one that changes
            while True:
                for _ in range(stay):
                    mine &= mine - np.uint64(1)
                i = at + _first(mine)
                if i >= data.size:
                    return done
                code, place = np.int64(steps[k]), np.int64(data[i])
                places[done], was[done] = i, data[i]
                place ^= whole if place & sign else sign
                new = (place + ((code >> 1) ^ (whole if code & 1 else 0))) & whole
                if sign:
                    new ^= sign if new & sign else whole
                data[i] = new
                done += 1
                k += 1
                if k >= ends[b]:
                    ranks[b] = NEVER
                    break
                if gaps[k] + np.uint64(1) >= left:
                    ranks[b] = seen[b] - left + np.uint64(1) + gaps[k]
                    break
                mine &= mine - np.uint64(1)
                stay = np.uint64(gaps[k])
                left -= stay + np.uint64(1)
            upcoming[b] = k
            due &= due - np.uint64(1)
    return done

"""Slices of any axis: values and patches mean the same as plain indexing does."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.weights.patch import TensorPatch
from infra.weights.tensor_slice import Slice


@st.composite
def slices(draw: st.DrawFn) -> tuple[Slice, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    axis = draw(st.integers(0, len(shape) - 1))
    ends = sorted(draw(st.sets(st.integers(0, shape[axis]), min_size=2, max_size=4)))
    spans = tuple(zip(ends[::2], ends[1::2], strict=False))
    return Slice(axis, spans), shape


def by_indexing(mine: Slice, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    places = np.concatenate([np.arange(begin, end) for begin, end in mine.spans])
    return np.take(values.reshape(shape), places, axis=mine.axis)


@settings(max_examples=150, deadline=None)
@given(slices(), st.sampled_from([np.uint32, np.int64]), st.integers(0, 99))
def test_a_slice_of_a_patch_patches_the_slice(
    case: tuple[Slice, tuple[int, ...]], positions: type, seed: int
) -> None:
    (mine, shape), random = case, np.random.default_rng(seed)
    old = random.integers(0, 1 << 32, int(np.prod(shape)), np.uint32)
    changed = np.flatnonzero(random.random(old.size) < 0.4).astype(positions)
    new = old.copy()
    new[changed] ^= np.uint32(5)
    assert mine.shape(shape) == by_indexing(mine, old, shape).shape
    np.testing.assert_array_equal(mine.values(old, shape), by_indexing(mine, old, shape).reshape(-1))
    whole = mine.patch(TensorPatch("F32", shape, None, new))
    np.testing.assert_array_equal(whole.values, by_indexing(mine, new, shape).reshape(-1))
    some = mine.patch(TensorPatch("F32", shape, changed, new[changed]))
    assert some.positions is not None and some.positions.dtype == positions
    assert np.all(some.positions[1:] > some.positions[:-1])
    have = by_indexing(mine, old, shape).reshape(-1).copy()
    some.apply(have)
    np.testing.assert_array_equal(have, by_indexing(mine, new, shape).reshape(-1))


def test_one_span_of_rows_is_not_copied() -> None:
    flat = np.arange(12, dtype=np.uint32)
    assert np.shares_memory(Slice(0, ((1, 3),)).values(flat, (4, 3)), flat)

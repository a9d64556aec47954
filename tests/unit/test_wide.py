"""Wide numbers to bytes: all come back, and damaged bytes are an error or other numbers of the same type."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.weights.codec import streams, wide
from infra.weights.weights_error import WeightsError
from tests.damage import cuts_and_flips

TYPES = [np.uint8, np.uint16, np.uint32]


def back(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return wide.unpack(memoryview(wide.pack_wide(numbers)), numbers.dtype, numbers.size, "it")


@given(
    st.sampled_from(TYPES), st.integers(0, 400), st.integers(0, 32), st.floats(0, 1), st.integers(0, 2**32)
)
@settings(deadline=None)
def test_all_numbers_lead_back(dtype: type, count: int, bits: int, large: float, seed: int) -> None:
    """Of so many bits, but for a part that may be as large as the type allows."""
    rng, most = np.random.default_rng(seed), int(np.iinfo(dtype).max)
    usual, any_ = rng.integers(0, min(1 << bits, most), count, endpoint=True), rng.integers(0, most, count)
    numbers = np.where(rng.random(count) < large, any_, usual).astype(dtype)
    found = back(numbers)
    assert found.dtype == numbers.dtype
    assert np.array_equal(found, numbers)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_numbers_lead_back(dtype: type) -> None:
    for numbers in (np.full(9, np.iinfo(dtype).max, dtype), np.array([0] * 8 + [np.iinfo(dtype).max], dtype)):
        assert np.array_equal(back(numbers), numbers)


def test_it_is_about_as_small_as_with_bins() -> None:
    numbers = (np.abs(np.random.default_rng(0).normal(0, 1, 1 << 17)) * 3e4).astype(np.uint32)
    assert len(streams.pack_streams(numbers, fast=True)) < 1.01 * len(streams.pack_streams(numbers))


def test_damaged_bytes_are_an_error_or_as_many_numbers() -> None:
    numbers = np.array([5, 70, 900, 3, 65535, 12, 13, 1 << 31, 99], np.uint32)
    for raw in cuts_and_flips(wide.pack_wide(numbers)):
        with contextlib.suppress(WeightsError):
            found = wide.unpack(memoryview(raw), numbers.dtype, numbers.size, "it")
            assert (found.size, found.dtype) == (numbers.size, numbers.dtype)


def test_numbers_that_the_type_does_not_have_are_refused() -> None:
    raw = wide.pack_wide(np.full(9, 1 << 30, np.uint32))
    with pytest.raises(WeightsError, match=r"too large|too soon"):
        wide.unpack(memoryview(raw), np.dtype(np.uint16), 9, "it")


def test_a_large_number_that_is_not_there_is_an_error() -> None:
    raw = wide.pack_wide(np.array([1] * 50 + [1 << 20], np.uint32))
    with pytest.raises(WeightsError, match="it is damaged: it does not say all of its large numbers"):
        wide.unpack(memoryview(raw[:-4]), np.dtype(np.uint32), 51, "it")

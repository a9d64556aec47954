"""Weights in four bits: the nearest that there are, the same ones again, and the kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.weights import four_bits, four_bits_gpu
from infra.weights.four_bits import BLOCK_WEIGHTS, exactly, rounded, values
from tests.triton_kernels import check_compiles, interpreted, print_launches

SIZES = (1, 2, BLOCK_WEIGHTS, 3 * BLOCK_WEIGHTS + 7, 5000)


def drawn(size: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 400), st.integers(0, 1 << 30), st.sampled_from([1e-30, 0.02, 1.0, 1e30]))
def test_the_nearest_weights_that_four_bits_can_say(size: int, seed: int, scale: float) -> None:
    weight = drawn(size, seed, scale)
    bits = rounded(weight)
    found, largest = bits.whole().float(), bits.largest.float().repeat_interleave(BLOCK_WEIGHTS)[:size]
    choices = values(weight.device) * largest[:, None]
    nearest = (choices - weight[:, None]).abs().amin(1)
    assert ((found - weight).abs() <= nearest + 2**-8 * largest).all()
    assert (weight.abs() <= largest * (1 + 2**-8)).all()


@given(st.integers(1, 400), st.integers(0, 1 << 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_rounding_again_changes_nothing(size: int, seed: int, dtype: torch.dtype) -> None:
    once = rounded(drawn(size, seed).to(dtype)).whole().to(dtype)
    again = exactly(once)
    assert again is not None
    assert torch.equal(again.whole().to(dtype), once)


def test_other_weights_are_not_said_exactly() -> None:
    assert exactly(drawn(5000)) is None
    assert exactly(drawn(5000).bfloat16()) is None
    late = rounded(drawn(20_000)).whole()
    late[-1] += 0.011
    assert exactly(late) is None, "also where the first weights are such"
    assert exactly(torch.empty(0)) is None
    for odd in (float("nan"), float("inf")):
        assert exactly(torch.tensor([odd, 1.0])) is None


def test_zeros_and_shapes_are_kept() -> None:
    weight = torch.zeros(3, 50)
    weight[2, 40:] = torch.tensor([0.5, -0.5] * 5)
    bits = exactly(weight)
    assert bits is not None
    assert torch.equal(bits.whole().float(), weight)
    assert bits.codes.nbytes + bits.largest.nbytes == 3 * 32 + 3 * 2


@pytest.mark.parametrize("stretch", [BLOCK_WEIGHTS, 1 << 22])
def test_it_does_not_depend_on_stretches(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rounded(drawn(5000)).whole()
    monkeypatch.setattr(four_bits, "_STRETCH", stretch)
    assert torch.equal(rounded(drawn(5000)).whole(), whole)


def kernel() -> None:
    def work() -> None:
        for size in SIZES:
            bits = rounded(drawn(size))
            known = values(bits.codes.device)
            found = four_bits_gpu.whole_there(bits.codes, bits.largest, known, size, BLOCK_WEIGHTS)
            assert torch.equal(found, bits.whole())
            doubled = bits.largest.repeat_interleave(2)
            halves = four_bits_gpu.whole_there(bits.codes, doubled, known, size, BLOCK_WEIGHTS // 2)
            assert torch.equal(halves, found)

    print_launches(four_bits_gpu, work)


def test_the_kernel_makes_the_same_weights_and_compiles_for_an_h100() -> None:
    check_compiles(four_bits_gpu, interpreted(kernel))

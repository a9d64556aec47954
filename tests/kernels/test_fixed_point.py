"""Sums of gradients: exact, in any order, by the compiled loop as by torch and by the kernel for GPUs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.learners.fixed_point import FixedPointSum
from tests.training import taken
from tests.triton_kernels import check_compiles, interpreted, print_launches

CPU = torch.device("cpu")
numbers = st.floats(-(2.0**20), 2.0**20, width=32)


def mean(one: FixedPointSum, total: float) -> torch.Tensor:
    found = torch.full(one._sum.shape, math.nan, dtype=torch.float64)
    one.mean_into(found, total)
    return found


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=8), st.randoms())
@settings(deadline=None)
def test_the_same_bits_in_any_order(gradients: list[list[float]], draw: object) -> None:
    sums = []
    for _ in range(2):
        one = FixedPointSum(3, CPU)
        draw.shuffle(gradients)  # type: ignore[attr-defined]
        for gradient in gradients:
            given_ = torch.tensor(gradient)
            assert taken(one, given_)
            assert not given_.any()
        sums.append(mean(one, 7.0))
    assert torch.equal(*sums)
    exact = [math.fsum(round(gradient[n] * 2**32) for gradient in gradients) / 2**32 / 7 for n in range(3)]
    torch.testing.assert_close(sums[0], torch.tensor(exact, dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**31])
@pytest.mark.parametrize("place", [0, 2])
def test_what_does_not_fit_is_told(bad: float, place: int) -> None:
    gradient = torch.ones(3)
    gradient[place] = bad
    assert not taken(FixedPointSum(3, CPU), gradient)


def test_a_sum_that_may_not_fit_is_told_and_the_next_begins_anew() -> None:
    one = FixedPointSum(1, CPU)
    large = 2.0**29 - 1
    assert taken(one, torch.tensor([large]))
    assert not taken(one, torch.tensor([-large - 2]))
    mean(one, 1.0)
    assert taken(one, torch.tensor([large]))


def on_a_gpu() -> None:
    """The kernel for GPUs adds what torch adds."""
    from consumers.learners.fixed_point_gpu import add_and_clear_there

    draw = torch.Generator().manual_seed(0)
    scale = torch.exp2(torch.randint(-40, 20, (9000,), generator=draw).float())
    gradient = torch.randn(9000, generator=draw) * scale
    halves = (torch.arange(-3.0, 4.0) + 0.5) / 2**32
    gradient[:7], gradient[7:9] = halves, torch.tensor([2.0**-9 + 2.0**-33, -(2.0**-9) - 2.0**-33])
    before = torch.arange(9000) * 10**12
    expected, most = before + (gradient * 2.0**32).round().to(torch.int64), float(gradient.abs().max())
    assert add_and_clear_there(gradient, before, 2.0**32) == most
    assert torch.equal(before, expected)
    assert not gradient.any()
    for bad in (math.nan, math.inf, -math.inf):
        assert (
            add_and_clear_there(torch.tensor([1.0, bad]), torch.zeros(2, dtype=torch.int64), 2.0**32)
            == math.inf
        )


def launches() -> None:
    """Print how the kernel for GPUs is launched."""
    from consumers.learners import fixed_point_gpu

    def add() -> None:
        for size in (48, 49):  # a critic's size is odd; of a multiple of 16 another kernel is compiled
            one = torch.ones(size), torch.zeros(size, dtype=torch.int64)
            fixed_point_gpu.add_and_clear_there(*one, 2.0**32)

    print_launches(fixed_point_gpu, add)


def test_the_kernel_for_gpus_adds_what_torch_adds() -> None:
    interpreted(on_a_gpu)


def test_the_kernel_for_gpus_compiles_for_an_h100() -> None:
    from consumers.learners import fixed_point_gpu

    check_compiles(fixed_point_gpu, interpreted(launches))

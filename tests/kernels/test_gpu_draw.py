"""Tokens that kernels draw: those of the plain way, row by row. The kernels compile for an H100."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from producers.engines import gpu_draw
from tests.triton_kernels import check_compiles, interpreted, print_launches


def drawn_plainly(logits: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = logits.double().log_softmax(-1)
    mass = logprobs.exp().cumsum(-1)
    tokens = torch.searchsorted(mass, (draws * mass[:, -1])[:, None], right=True)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0].float()


def some(rows: int, size: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(size)
    logits = torch.from_numpy(draw.normal(0, spread, (rows, size)).astype(np.float32))
    there = torch.get_default_device()
    return logits.to(there), torch.from_numpy(draw.random(rows)).to(there)


def draw() -> None:
    """Vocabularies of one block and of several; logits in fp32 and bf16, alike, far apart, and impossible."""
    for rows, size, spread in ((6, 24, 1.0), (5, 4096, 0.0), (7, 9001, 4.0), (3, 5000, 90.0)):
        for dtype in (torch.float32, torch.bfloat16):
            logits, draws = some(rows, size, spread)
            logits = logits.to(dtype)
            logits[:, 1::3] = -torch.inf
            tokens, logprobs = gpu_draw.drawn_there(logits, draws)
            expected, theirs = drawn_plainly(logits, draws)
            assert torch.equal(tokens, expected)
            torch.testing.assert_close(logprobs, theirs, rtol=1e-6, atol=1e-6)
            alone, one = gpu_draw.drawn_there(logits[2:3], draws[2:3])
            assert alone == tokens[2] and one == logprobs[2]


def edges() -> None:
    """The least and the largest draw; blocks without a possible token; slices of a tensor; no number."""
    logits = torch.full((2, 20_000), -torch.inf)
    logits[:, 5000], logits[:, 12_300] = 0.0, 1.0
    tokens, _ = gpu_draw.drawn_there(logits, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [5000, 12_300]
    whole, draws = some(4, 6000, 2.0)
    apart = whole[:, 100:5100]
    expected = gpu_draw.drawn_there(apart.contiguous(), draws)
    for rows in (slice(0, 4), slice(0, 1)):
        found = gpu_draw.drawn_there(apart[rows], draws[rows])
        assert all(torch.equal(one, other[rows]) for one, other in zip(found, expected, strict=True))
    whole[0, 4500] = torch.nan
    _, logprobs = gpu_draw.drawn_there(whole, draws)
    assert logprobs.isnan().tolist() == [True, False, False, False]


def unlikely() -> None:
    """No draw is rounded to the last token of a block, which hardly has a chance."""
    logits = torch.randn(100, 8192, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    logits[:, 4095::4096] = -60.0
    logits = logits.to(torch.get_default_device())
    mass = logits.double().softmax(-1).cumsum(-1)
    near = mass[:, 4095] * (1 - 1e-9)  # just below the end of the first block
    tokens, _ = gpu_draw.drawn_there(logits, near)
    assert not (tokens % 4096 == 4095).any()


def test_tokens_are_those_of_the_plain_way() -> None:
    interpreted(draw)


def test_the_least_and_the_largest_draw() -> None:
    interpreted(edges)


def test_unlikely_tokens_are_not_drawn() -> None:
    interpreted(unlikely)


def test_odd_batches_take_the_kernels_of_even_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton makes other ones, in the middle of a run, for memory that does not begin at a multiple of 16."""
    given = list[torch.Tensor]()

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *values, **named: given.extend(one for one in values if torch.is_tensor(one))

    for name in ("block_kernel", "token_kernel"):
        monkeypatch.setattr(gpu_draw, name, Kernel())
    for rows in (1, 2, 3):
        gpu_draw.drawn_there(torch.zeros(rows, 9001), torch.zeros(rows, dtype=torch.float64))
    assert given and all(one.data_ptr() % 16 == 0 for one in given)


def launches() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits, draws = some(3, 9001, 1.0)
        print_launches(gpu_draw, lambda: gpu_draw.drawn_there(logits.to(dtype), draws))  # noqa: B023


def test_the_kernels_compile_for_an_h100() -> None:
    for said in interpreted(launches).splitlines():
        check_compiles(gpu_draw, said)

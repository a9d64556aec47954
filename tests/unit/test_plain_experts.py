"""Experts of the engine on a CPU: right, from weights as they are, with bits of their own."""

from __future__ import annotations

import pytest
import torch

from producers.engines import plain_experts
from producers.engines.plain_experts import PlainExperts

EXPERTS, TAKEN, WIDTH, INNER = 6, 2, 32, 24


def drawn(dtype: torch.dtype, tokens: int = 40) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    hidden, w13, w2 = (
        torch.randn(*shape, generator=draw).to(dtype)
        for shape in ((tokens, WIDTH), (EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER))
    )
    scores = torch.randn(tokens, EXPERTS, generator=draw).softmax(-1)
    weights, experts = scores.topk(TAKEN)
    return hidden, w13, w2, weights, experts


def one_by_one(
    hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    found = torch.zeros_like(hidden, dtype=torch.float64)
    for token in range(len(hidden)):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            gate, up = (hidden[token].double() @ w13[expert].double().T).chunk(2)
            found[token] += weight.double() * (w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("invariant", [True, False])
def test_it_computes_what_the_formula_says(dtype: torch.dtype, invariant: bool) -> None:
    given = drawn(dtype)
    found = PlainExperts(invariant=invariant).compute(*given, "silu")
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), one_by_one(*given), rtol=0.05 if dtype == torch.bfloat16 else 1e-4,
        atol=0.6 if dtype == torch.bfloat16 else 1e-3,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_do_not_depend_on_the_others(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, w13, w2, weights, experts = drawn(dtype)
    mine = PlainExperts(invariant=True)
    together = mine.compute(hidden, w13, w2, weights, experts, "silu")
    for some in (slice(0, 1), slice(7, 20), slice(39, 40)):
        alone = mine.compute(hidden[some], w13, w2, weights[some], experts[some], "silu")
        assert torch.equal(alone, together[some])
    monkeypatch.setattr(plain_experts, "_MOST_AT_ONCE", 1000)  # a long prompt goes in pieces
    assert torch.equal(mine.compute(hidden, w13, w2, weights, experts, "silu"), together)


def test_a_weight_that_is_written_in_place_counts_at_once() -> None:
    hidden, w13, w2, weights, experts = drawn(torch.float32)
    mine = PlainExperts(invariant=True)
    before = mine.compute(hidden, w13, w2, weights, experts, "silu")
    expert = int(experts[0, 0])
    w13[expert, 3, 5] += 1.0
    after = mine.compute(hidden, w13, w2, weights, experts, "silu")
    changed = (before != after).any(-1)
    assert torch.equal(changed, (experts == expert).any(-1))


@pytest.mark.parametrize("invariant", [True, False])
def test_ranks_with_their_own_experts_add_up_to_all(invariant: bool) -> None:
    hidden, w13, w2, weights, experts = drawn(torch.float32)
    mine, total = PlainExperts(invariant=invariant), torch.zeros_like(hidden)
    for first, last in ((0, 2), (2, EXPERTS), (EXPERTS, EXPERTS)):  # the last rank has none
        here = torch.full((EXPERTS,), -1, dtype=torch.int32)
        here[first:last] = torch.arange(last - first, dtype=torch.int32)
        total += mine.compute(hidden, w13[first:last], w2[first:last], weights, experts, "silu", here)
    whole = mine.compute(hidden, w13, w2, weights, experts, "silu")
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-3)


def test_ranks_with_slices_of_experts_add_up_to_all() -> None:
    hidden, w13, w2, weights, experts = drawn(torch.float32)
    mine, total, half = PlainExperts(invariant=True), torch.zeros_like(hidden), INNER // 2
    for begin in (0, half):
        gate, up = w13[:, begin : begin + half], w13[:, INNER + begin : INNER + begin + half]
        slices = torch.cat([gate, up], dim=1), w2[:, :, begin : begin + half].contiguous()
        total += mine.compute(hidden, *slices, weights, experts, "silu")
    whole = mine.compute(hidden, w13, w2, weights, experts, "silu")
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-3)

"""Sequences packed end to end against the same model on each sequence alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from consumers.batches import packing, varlen_attention
from infra.cpu_linear import linear, padded_rows


def make_model(**changes: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, **changes,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


MODELS = {
    "grouped heads": make_model(),
    "sliding window": make_model(use_sliding_window=True, sliding_window=4, max_window_layers=1),
}


def hidden_and_gradients(
    model: Qwen2ForCausalLM, run: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    model.zero_grad()
    hidden = run()
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def call_of_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, also: torch.Tensor,
    longest: int, longest_too: int, *, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Compute, sequence by sequence, what torch's call for GPUs computes in one go."""
    assert starts is also
    assert longest == longest_too == int(starts.diff().max())
    parts = (x.transpose(0, 1).split(starts.diff().tolist(), dim=1) for x in (query, key, value))
    each = zip(*parts, strict=True)
    found = [scaled_dot_product_attention(*qkv, is_causal=True, scale=scale) for qkv in each]
    return torch.cat(found, dim=1).transpose(0, 1)


@contextmanager
def in_one_call(yes: bool) -> Iterator[None]:
    if not yes:
        yield
        return
    with (
        patch.object(varlen_attention, "fits", lambda query: True),
        patch.object(varlen_attention, "_call", lambda: call_of_torch),
    ):
        yield


@pytest.mark.parametrize("one_call", [True, False])
@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("kind", MODELS)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
@settings(deadline=None, max_examples=10)
def test_packed_is_as_alone(one_call: bool, fills: bool, kind: str, sizes: list[int]) -> None:
    model = MODELS[kind]
    sequences = [torch.randint(24, (size,), generator=torch.Generator().manual_seed(size)) for size in sizes]
    model.set_attn_implementation("eager")
    alone, expected = hidden_and_gradients(
        model,
        lambda: torch.cat([model.model(input_ids=tokens[None]).last_hidden_state[0] for tokens in sequences]),
    )
    packing.use_packed_attention(model)
    with patch.object(packing, "pays", lambda: fills):
        packed = packing.pack_sequences(sizes)
    tokens = torch.zeros(packed.positions.shape[0], dtype=torch.long)
    tokens[: packed.tokens] = torch.cat(sequences)
    with in_one_call(one_call):
        together, found = hidden_and_gradients(
            model,
            lambda: model.model(
                input_ids=tokens[None], position_ids=packed.positions[None], packing=packed
            ).last_hidden_state[0, : packed.tokens],
        )
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
@settings(deadline=None)
def test_grids_cost_least(sizes: list[int]) -> None:
    sizes.sort()
    runs = [list(run) for _, run in itertools.groupby(sizes)]
    possible = [
        [list(itertools.chain(*runs[begin:end])) for begin, end in itertools.pairwise([0, *ends, len(runs)])]
        for count in range(len(runs))
        for ends in itertools.combinations(range(1, len(runs)), count)
    ]

    def cost(grids: list[list[int]]) -> float:
        return sum(packing.GRID_COST + len(grid) * max(grid) - sum(grid) for grid in grids)

    packed = packing.pack_sequences(sizes)
    ends = list(itertools.accumulate(grid.sequences for grid in packed.grids))
    found = [sizes[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    assert ends[-1] == packed.sequences == len(sizes)
    assert cost(found) == min(map(cost, possible))
    assert packed.places == sum(len(grid) * max(grid) for grid in found)
    assert [grid.tokens for grid in packed.grids] == [sum(grid) for grid in found]


@given(st.integers(1, 5000))
def test_padding_is_small_and_sizes_are_few(rows: int) -> None:
    padded = padded_rows(rows)
    assert rows <= padded <= max(rows + 7, rows * 9 / 8)
    assert padded % 8 == 0
    assert padded_rows(padded) == padded


@pytest.mark.parametrize("biased", [True, False])
@given(st.lists(st.integers(1, 9), min_size=1, max_size=2))
@settings(deadline=None, max_examples=20)
def test_linear_is_that_of_torch(biased: bool, before: list[int]) -> None:
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(*before, 12, generator=noise)
    weight = torch.randn(20, 12, generator=noise)
    bias = torch.randn(20, generator=noise) if biased else None
    results = []
    for compute in (linear, torch.nn.functional.linear):
        leaves = [part.clone().requires_grad_() for part in (x, weight, bias) if part is not None]
        out = compute(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_one_call_is_for_gpus_and_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not varlen_attention.fits(torch.zeros(1, 2, 3, 8))
    assert varlen_attention._call() is not None  # this torch has it
    queries = SimpleNamespace(
        is_cuda=True, dtype=torch.bfloat16, shape=(1, 2, 3, 64), device=torch.device("cuda")
    )
    assert varlen_attention.fits(queries)  # type: ignore[arg-type]
    for other in ({"dtype": torch.float32}, {"shape": (1, 2, 3, 60)}, {"shape": (1, 2, 3, 512)}):
        assert not varlen_attention.fits(SimpleNamespace(**vars(queries) | other))  # type: ignore[arg-type]
    monkeypatch.setenv("STREAMRL_ATTENTION", "grids")
    assert not varlen_attention.fits(queries)  # type: ignore[arg-type]


def test_the_kernel_is_tried_with_gradients_also_in_a_pass_without() -> None:
    def grouped(query: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        keys = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in others[:2])
        return call_of_torch(query, *keys, *others[2:], **more)

    for gradients in (True, False):
        varlen_attention.takes_groups.cache_clear()
        with patch.object(varlen_attention, "_call", lambda: grouped), torch.set_grad_enabled(gradients):
            assert varlen_attention.takes_groups(torch.device("cpu"))
    varlen_attention.takes_groups.cache_clear()


def test_layers_that_are_computed_again_save_as_much_as_the_first_time() -> None:
    """Also the first layer of a process, which tries the kernel."""
    varlen_attention.takes_groups.cache_clear()
    model = make_model()
    packing.use_packed_attention(model)
    packed = packing.pack_sequences([5, 3])
    tokens = torch.arange(packed.positions.shape[0]) % 24

    def run() -> torch.Tensor:
        found: torch.Tensor = model.model(
            input_ids=tokens[None], position_ids=packed.positions[None], packing=packed, use_cache=False
        ).last_hidden_state[0, : packed.tokens]
        return found

    with in_one_call(True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        again = hidden_and_gradients(model.train(), run)
        assert varlen_attention.takes_groups.cache_info().misses == 1
        assert packed.places == 10
        assert "grids" not in vars(packed), "one call needs none"
        model.gradient_checkpointing_disable()
        kept = hidden_and_gradients(model, run)
    torch.testing.assert_close(again, kept)

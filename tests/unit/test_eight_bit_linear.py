"""Products with weights in eight bits on a CPU, both ways: against exact arithmetic, and row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infra.choices import LINEAR
from producers.engines import eight_bit_linear as ours
from producers.engines.engine import EngineError
from producers.engines.scatter import HeldWeights
from tests.factories import make_tiny_mixture

PRODUCTS = {"int8": ours.integer_product, "fp8": ours.fp8_product}


@pytest.fixture(params=("onednn", "mkl"))
def linear(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(LINEAR.variable, request.param)
    return str(request.param)


def drawn(kind: str, dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, ...]:
    """Rows of activations, a weight with its scales, and a bias."""
    noise = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=noise).to(dtype)
    weight, scale = ours.rounded_weight(torch.randn(48, 96, generator=noise), kind)
    return x, weight, scale, torch.randn(48, generator=noise).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", sorted(PRODUCTS))
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_that_of_the_rounded_numbers(
    kind: str, dtype: torch.dtype, biased: bool, linear: str
) -> None:
    x, weight, scale, bias = drawn(kind, dtype, 40)
    found = PRODUCTS[kind](weight, scale, dtype)(x, bias if biased else None)
    numbers, by = ours.rounded_weight(x, kind)
    exact = (numbers.double() @ weight.double().t()) * by.double()[:, None] * scale.double()
    exact += bias.double() if biased else 0.0
    assert found.dtype == dtype
    off = 1e-5 if dtype == torch.float32 else 2.0**-6
    assert torch.allclose(found.double(), exact, rtol=off, atol=off * float(exact.abs().max()))


@pytest.mark.parametrize("kind", sorted(PRODUCTS))
def test_a_row_has_the_same_bits_whatever_is_beside_it(kind: str, linear: str) -> None:
    x, weight, scale, bias = drawn(kind, torch.float32, 600)
    layer: Any = SimpleNamespace(
        weight=torch.nn.Parameter(weight, requires_grad=False),
        weight_scale=torch.nn.Parameter(scale, requires_grad=False), params_dtype=torch.float32,
    )  # fmt: skip
    made = ours.EightBitLinear(layer, kind, invariant=True, known={})
    whole = made(x, bias)
    for first, last in ((0, 1), (7, 40), (511, 600)):
        assert torch.equal(made(x[first:last], bias), whole[first:last])
    assert torch.equal(made(x.view(2, 300, 96), bias).view(600, 48), whole)


def test_a_row_of_zeros_is_the_bias(linear: str) -> None:
    for kind, product in PRODUCTS.items():
        x, weight, scale, bias = drawn(kind, torch.float32, 8)
        x[3] = 0.0
        assert torch.equal(product(weight, scale, torch.float32)(x, bias)[3], bias)


@pytest.mark.parametrize("kind", sorted(PRODUCTS))
def test_a_gpu_s_kernels_are_called_as_they_want_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels of the same contract as vLLM's, which a CPU's build does not have."""
    import vllm._custom_ops as ops

    def rounded(x: torch.Tensor, **named: Any) -> tuple[torch.Tensor, ...]:
        assert x.dim() == 2 and named == ({} if kind == "int8" else {"use_per_token_if_dynamic": True})
        numbers, by = ours.rounded_weight(x, kind)
        return (numbers, by[:, None]) if kind == "fp8" else (numbers, by[:, None], None)

    def multiply(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
        out_dtype: torch.dtype, bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        assert a.is_contiguous() and b.t().is_contiguous() and scale_b.is_contiguous()
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (b.shape[1], 1))
        out = (a.float() @ b.float()) * scale_a * scale_b.t()
        return (out if bias is None else out + bias).to(out_dtype)

    monkeypatch.setattr(ops, "scaled_int8_quant", rounded)
    monkeypatch.setattr(ops, "scaled_fp8_quant", rounded)
    monkeypatch.setattr(ops, "cutlass_scaled_mm", multiply)
    x, weight, scale, bias = drawn(kind, torch.bfloat16, 6)
    expected = PRODUCTS[kind](weight, scale, torch.bfloat16)(x, bias)
    found = ours.on_gpu(x.view(2, 3, 96), weight, scale, bias)
    assert found.shape == (2, 3, 48)
    assert torch.allclose(found.view(6, 48).float(), expected.float(), rtol=0.02, atol=0.3)


@pytest.mark.parametrize(
    ("kind", "capability", "refused"),
    [
        ("int8", (7, 5), False), ("int8", (9, 0), False), ("int8", (10, 0), True), ("int8", (7, 0), True),
        ("fp8", (8, 0), True), ("fp8", (8, 9), False), ("fp8", (12, 0), False),
    ],
)  # fmt: skip
def test_a_gpu_without_kernels_is_refused(
    kind: str, capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.choices.cuda", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    if not refused:
        ours.check_gpu(kind, "bfloat16")
        with pytest.raises(EngineError, match=r"on a GPU needs model\.dtype: bfloat16; it is float32"):
            ours.check_gpu(kind, "float32")
        return
    with pytest.raises(EngineError, match=rf"generator\.quantization {kind}: .* capability {capability[0]}"):
        ours.check_gpu(kind, "bfloat16")


def test_a_layer_that_vllm_left_plain_is_named() -> None:
    model = torch.nn.Module()
    model.o_proj = torch.nn.Linear(4, 4, bias=False)
    shapes = {"o_proj.weight": (4, 4)}
    held = HeldWeights(model, shapes, [])
    with pytest.raises(EngineError, match=r"holds o_proj\.weight as torch\.float32, and not in eight bits"):
        ours.check_rounded(held, shapes)
    model.o_proj.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    ours.check_rounded(HeldWeights(model, shapes, []), shapes)


def test_a_mixture_of_experts_is_refused_by_the_engine_too(tmp_path: Any) -> None:
    model = make_tiny_mixture(tmp_path / "model", "qwen3_moe")
    with pytest.raises(EngineError, match="is a mixture of experts, and experts are not held in eight bits"):
        ours.check_no_experts(str(model))

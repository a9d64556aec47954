"""Weights in eight bits: the nearest there are, the same by numpy and by torch, exact in patches."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.weights.bits import Bits, Model, bits_of, model_of
from infra.weights.digest import digest_of, model_digests
from infra.weights.eight_bits import (
    EIGHT_BITS,
    LEAST_SCALE,
    has_eight_bits,
    is_rounded,
    scale_name,
    shapes_with_scales,
)
from infra.weights.patch import PatchFile
from infra.weights.slices import Slicing, slice_name
from producers.engine_form import EngineForm
from producers.engines.eight_bit_linear import rounded_weight
from tests.factories import make_spec, make_tiny_model

KINDS = sorted(EIGHT_BITS)
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


def numbers_of(bits: Bits) -> torch.Tensor:
    """The numbers that codes stand for."""
    kind = next(kind for kind, one in EIGHT_BITS.items() if one.dtype == bits.dtype)
    return torch.from_numpy(bits.data.copy()).view(TYPES[kind]).double().view(bits.shape)


def drawn(seed: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights of all sizes, with a row of zeros and one of numbers that are hardly any."""
    noise = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, width, generator=noise)
    found *= 10.0 ** torch.randint(-9, 3, (rows, width), generator=noise)
    found[0] = 0.0
    found[-1] *= 1e-40
    return found.to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 9999), rows=st.integers(2, 6), width=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_each_weight_becomes_the_nearest_number_there_is(
    kind: str, seed: int, rows: int, width: int, dtype: torch.dtype
) -> None:
    weight = drawn(seed, rows, width, dtype)
    codes, scales = EIGHT_BITS[kind].rounded(bits_of(weight))
    assert (codes.shape, scales.shape, scales.dtype) == ((rows, width), (rows,), "F32")
    every = torch.arange(256).to(torch.uint8).view(TYPES[kind]).double()
    known = sorted({Fraction(one) for one in every[every.isfinite()].tolist() if abs(one) <= 448})
    by = scales.data.view(np.float32)
    rounded = numbers_of(codes)
    for row in range(rows):
        largest = np.abs(weight[row].float().numpy()).max()
        assert by[row] == max(np.float32(LEAST_SCALE), largest / np.float32(EIGHT_BITS[kind].most))
        for column in range(width):
            exact = Fraction(float(np.float32(weight[row, column].float().item()) / by[row]))
            off = min(abs(one - exact) for one in known if kind == "fp8" or abs(one) <= 127)
            assert abs(Fraction(float(rounded[row, column])) - exact) == off


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999), rows=st.integers(2, 40), width=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_torch_rounds_to_the_same_bits(
    kind: str, seed: int, rows: int, width: int, dtype: torch.dtype
) -> None:
    """Ties too: all numbers halfway between two codes are among small multiples of a power of two."""
    weight = drawn(seed, rows, width, dtype)
    weight[1] = torch.randint(-448, 449, (width,)).to(dtype) / 2
    weight[1, 0] = EIGHT_BITS[kind].most  # so that the scale is 1, and halves are ties
    codes, scales = EIGHT_BITS[kind].rounded(bits_of(weight))
    theirs, by = rounded_weight(weight, kind)
    assert codes.data.tobytes() == theirs.view(torch.uint8).numpy().tobytes()
    assert scales.data.tobytes() == by.numpy().tobytes()


def test_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]])
    codes, _ = EIGHT_BITS["int8"].rounded(bits_of(ties))
    assert numbers_of(codes).tolist() == [[127, 0, 2, 2, 0, -2, 126]]
    ties = torch.tensor([[448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -17.0]])
    codes, _ = EIGHT_BITS["fp8"].rounded(bits_of(ties))
    assert numbers_of(codes).tolist() == [[448, 16, 20, 0, 2.0**-8, -16]]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_rounded_each_by_itself_however_many_there_are(kind: str) -> None:
    weight = bits_of(torch.randn(700, 1000))  # more than are rounded at a time
    codes, scales = EIGHT_BITS[kind].rounded(weight)
    for row in (0, 261, 262, 263, 699):
        alone = Bits("F32", (1, 1000), weight.data[1000 * row :][:1000])
        code, scale = EIGHT_BITS[kind].rounded(alone)
        assert (code.data == codes.data[1000 * row :][:1000]).all() and scale.data[0] == scales.data[row]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (Q, (4, 4), True), ("model.layers.3.mlp.down_proj.weight", (4, 8), True),
        ("model.layers.3.mlp.gate_up_proj.weight", (4, 8), True), (Q.replace("weight", "bias"), (4,), False),
        ("model.layers.0.self_attn.q_norm.weight", (4,), False), (NORM, (4,), False),
        ("model.embed_tokens.weight", (9, 4), False), ("lm_head.weight", (9, 4), False),
        ("model.layers.0.mlp.gate.weight", (8, 4), False),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", (8, 4), False),
    ],
)  # fmt: skip
def test_linear_layers_are_rounded_and_nothing_else(
    name: str, shape: tuple[int, ...], expected: bool
) -> None:
    assert is_rounded(name, shape) is expected
    if expected:
        assert has_eight_bits(name.removesuffix(".weight"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def versions(folder: Path, share: float) -> tuple[Model, Model]:
    """A model, and the same one with some of its weights moved."""
    from safetensors.torch import load_file

    old = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    new = {
        name: one + 0.01 * (torch.rand(one.shape, generator=noise) < share) * (one.dim() > 1)
        for name, one in old.items()
    }
    return model_of(old), model_of(new)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_model_becomes_has_the_shapes_that_are_foretold(kind: str, folder: Path) -> None:
    model, _ = versions(folder, 0.0)
    found = EIGHT_BITS[kind].model(model)
    assert {name: bits.shape for name, bits in found.items()} == shapes_with_scales(
        {name: bits.shape for name, bits in model.items()}
    )
    assert found[NORM] is model[NORM]
    assert (found[Q].dtype, found[scale_name(Q)].dtype) == (EIGHT_BITS[kind].dtype, "F32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.002, 0.5])
def test_a_patch_between_rounded_versions_is_exact(kind: str, share: float, folder: Path) -> None:
    old, new = (EIGHT_BITS[kind].model(one) for one in versions(folder, share))
    engine: dict[str, Bits] = {}
    PatchFile({}, old, since=None, root="old").read().apply(engine)
    patch = PatchFile(old, new, since="old", root="new").read()
    assert bool(patch.parts) is (share > 0)
    patch.apply(engine)
    assert model_digests(engine) == model_digests(new)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_hashes_that_an_engine_must_find_are_those_of_rounded_slices(
    kind: str, ranks: int, folder: Path
) -> None:
    spec = make_spec(
        generator={"quantization": kind, "tensor_parallel": ranks},
        loss={"correction": "truncated", "correct_fresh": True},
    )
    model, _ = versions(folder, 0.0)
    form = EngineForm(folder, spec.generator)
    found, digests = form.rounded(model, model_digests(model))
    assert dict(digests) == model_digests(found)
    held = form.held(found, digests)
    if ranks == 1:
        assert held == dict(digests)
        return
    slicing = Slicing.of(folder, spec.generator.layout)
    down = Q.replace("self_attn.q_proj", "mlp.down_proj")
    for name in (Q, scale_name(Q), down, scale_name(down)):
        bits = found[name]
        for rank in range(ranks):
            mine = slicing.slice(name, bits.shape, rank)
            assert (mine is None) is (name == scale_name(down)), "columns have the scales of whole rows"
            part = bits if mine is None else Bits(
                bits.dtype, mine.shape(bits.shape), mine.values(bits.data, bits.shape)
            )  # fmt: skip
            assert held[slice_name(name, rank)] == digest_of(part)


def test_an_engine_with_plain_weights_gets_them_as_they_are(folder: Path) -> None:
    model, _ = versions(folder, 0.0)
    digests = model_digests(model)
    found, same = EngineForm(folder, make_spec().generator).rounded(model, digests)
    assert found is model and same is digests

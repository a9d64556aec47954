"""Writing patches into parameters in which several tensors lie, with a model that is none of vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.weights.bits import Bits, empty, model_of
from infra.weights.digest import model_digests
from infra.weights.eight_bits import EIGHT_BITS, shapes_with_scales
from infra.weights.patch import PatchFile
from producers.engines.engine import EngineError
from producers.engines.expert_places import place_of_experts
from producers.engines.packed_linear import Product
from producers.engines.scatter import HeldWeights
from tests.factories import make_patch

PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SHAPES = {
    "model.embed_tokens.weight": (6, 4),
    "model.layers.0.attn.q_proj.weight": (4, 4), "model.layers.0.attn.q_proj.bias": (4,),
    "model.layers.0.attn.k_proj.weight": (2, 4), "model.layers.0.attn.k_proj.bias": (2,),
    "model.layers.0.attn.v_proj.weight": (2, 4), "model.layers.0.attn.v_proj.bias": (2,),
    "model.layers.0.mlp.gate_proj.weight": (5, 4), "model.layers.0.mlp.up_proj.weight": (5, 4),
    "model.norm.weight": (4,),
}  # fmt: skip


class Fused(torch.nn.Module):
    """As vLLM has it: tensors one below the other, a padded vocabulary, a tied head."""

    packed_modules_mapping = PARTS

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()

        def module(rows: int, bias: bool = False) -> torch.nn.Linear:
            return torch.nn.Linear(4, rows, bias=bias, dtype=dtype).requires_grad_(False)

        attn, mlp = torch.nn.Module(), torch.nn.Module()
        attn.qkv_proj, mlp.gate_up_proj = module(8, bias=True), module(10)
        layer = torch.nn.Module()
        layer.attn, layer.mlp = attn, mlp
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([layer])
        self.model.embed_tokens = module(8)
        self.model.norm = torch.nn.Module()
        self.model.norm.weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        self.lm_head = torch.nn.Module()
        self.lm_head.weight = self.model.embed_tokens.weight


def held(dtype: torch.dtype = torch.float32) -> HeldWeights:
    return HeldWeights(Fused(dtype), SHAPES, [])


def drawn(dtype: str, seed: int, names: Sequence[str] = tuple(SHAPES)) -> dict[str, Bits]:
    """Any bits."""
    draw, found = np.random.default_rng(seed), {name: empty(dtype, SHAPES[name]) for name in names}
    for bits in found.values():
        bits.data[:] = draw.integers(0, 256, bits.data.nbytes, np.uint8).view(bits.data.dtype)
    return found


def take(weights: HeldWeights, file: PatchFile) -> dict[str, str]:
    weights.prepare(file.read())
    weights.take()
    weights.settle()
    return weights.digests()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16)]),
    st.lists(st.tuples(st.sets(st.sampled_from(sorted(SHAPES))), st.integers(0, 99)), max_size=5),
)
def test_patch_after_patch_the_engine_holds_what_was_published(
    kinds: tuple[str, torch.dtype], changes: list[tuple[set[str], int]]
) -> None:
    (dtype, torch_dtype), number = kinds, 0
    new = drawn(dtype, 1000)
    weights = held(torch_dtype)
    assert take(weights, PatchFile({}, new, since=None, root="0")) == model_digests(new)
    for number, (names, seed) in enumerate(changes, 1):
        old, other = new, drawn(dtype, seed)
        few = np.random.default_rng(seed).random(6 * 4) < 0.06
        new = {
            name: Bits(dtype, bits.shape, np.where(few[: bits.data.size], other[name].data, bits.data))
            if name in names
            else bits
            for name, bits in old.items()
        }
        file = PatchFile(old, new, since=str(number - 1), root=str(number))
        assert take(weights, file) == model_digests(new)
    assert model_digests(model_of({name: weights.tensor(name) for name in SHAPES})) == model_digests(new)


def test_what_is_prepared_changes_nothing_until_it_is_taken_and_a_newer_one_takes_its_place() -> None:
    weights = held()
    first, second, third = (drawn("F32", seed) for seed in range(3))
    take(weights, PatchFile({}, first, since=None, root="1"))
    weights.prepare(PatchFile(first, second, since="1", root="2").read())
    assert model_digests(model_of({n: weights.tensor(n) for n in SHAPES})) == model_digests(first)
    assert take(weights, PatchFile(first, third, since="1", root="3")) == model_digests(third)
    with pytest.raises(EngineError, match="the patch is for the weights 2; the engine holds 3"):
        weights.prepare(PatchFile(second, third, since="2", root="4").read())


@pytest.mark.parametrize("name", ["model.layers.0.attn.k_proj.weight", "model.norm.weight"])
def test_bits_that_are_not_those_of_the_patch_are_seen(name: str) -> None:
    weights, new = held(), drawn("F32", 0)
    weights.prepare(PatchFile({}, new, since=None, root="1").read())
    weights.take()
    weights.settle()
    weights.tensor(name).view(-1).view(torch.int32)[3] ^= 1
    expected = model_digests(new)
    assert {n for n, digest in weights.digests().items() if digest != expected[n]} == {name}


def test_a_neighbour_that_was_hit_is_seen_though_it_was_not_to_change() -> None:
    weights, old = held(), drawn("F32", 0)
    take(weights, PatchFile({}, old, since=None, root="1"))
    new = old | drawn("F32", 1, ["model.layers.0.attn.v_proj.weight"])
    weights.prepare(PatchFile(old, new, since="1", root="2").read())
    weights.take()
    weights.settle()
    weights.tensor("model.layers.0.attn.k_proj.weight").add_(1)
    expected = model_digests(new)
    wrong = {n for n, digest in weights.digests().items() if digest != expected[n]}
    assert wrong == {"model.layers.0.attn.k_proj.weight"}


def test_a_part_of_a_parameter_alone() -> None:
    """An adapter's version has only some layers; where they lie depends on the others."""
    weights, name = held(), "model.layers.0.mlp.up_proj.weight"
    before = weights.tensor("model.layers.0.mlp.gate_proj.weight").clone()
    new = drawn("F32", 3, [name])
    assert take(weights, PatchFile({}, new, since=None, root="1")) == model_digests(new)
    assert torch.equal(weights.tensor("model.layers.0.mlp.gate_proj.weight"), before)


def test_what_the_engine_has_no_place_for_is_refused() -> None:
    with pytest.raises(EngineError, match=r"no parameter for model\.extra\.weight: this model"):
        held().prepare(make_patch({"model.extra.weight": torch.zeros(2, 4)}).read())
    for wrong in (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(3), torch.zeros(4, 1)):
        with pytest.raises(EngineError, match=r"norm\.weight comes as .*; the engine has it as torch"):
            held().prepare(make_patch({"model.norm.weight": wrong}).read())


def test_a_stale_head_is_found() -> None:
    weights = held()
    weights._model.lm_head.weight = torch.nn.Parameter(torch.ones(8, 4))
    with pytest.raises(EngineError, match="lm_head is stale"):
        take(weights, PatchFile({}, drawn("F32", 0), since=None, root="1"))


def test_a_head_that_another_rank_computes_with_is_no_stale_copy() -> None:
    model = Fused(torch.float32)
    model.lm_head.weight = torch.nn.Parameter(torch.ones(8, 4), requires_grad=False)
    weights, new = HeldWeights(model, SHAPES, []), drawn("F32", 1)
    with pytest.raises(EngineError, match="the tied lm_head is stale"):
        take(weights, PatchFile({}, new, since=None, root="a"))
    weights.void("lm_head.weight")
    assert model.lm_head.weight.isnan().all()
    assert take(weights, PatchFile({}, new, since=None, root="a")) == model_digests(new)


def test_a_rank_finds_its_own_experts_by_their_numbers_in_the_model() -> None:
    parameters = {"a.experts.routed_experts.w13_weight": torch.zeros(2, 8, 4)}

    def place(expert: int) -> object:
        name = f"a.experts.{expert}.up_proj.weight"
        return place_of_experts(name, (4, 4), parameters, EngineError, first_expert=6)

    assert place(6) == ("a.experts.routed_experts.w13_weight", (0, slice(4, 8)))
    assert place(7) == ("a.experts.routed_experts.w13_weight", (1, slice(4, 8)))
    for elsewhere in (0, 5, 8):
        with pytest.raises(EngineError, match=f"it is of expert {elsewhere}, and the engine has 2 from 6 on"):
            place(elsewhere)


class Scaled:
    """A layer that is packed of a weight and the scales of its rows."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.parameters = (layer.weight, layer.weight_scale)
        self.product = self.pack(*(one.data for one in self.parameters))

    def pack(self, *tensors: torch.Tensor) -> Product:
        whole = tensors[0].float() * tensors[1][:, None]
        return lambda x, bias: x @ whole.t()


class Counting(Scaled):
    """A layer that notes by how many threads it is packed."""

    def pack(self, *tensors: torch.Tensor) -> Product:
        self.threads = torch.get_num_threads()
        return super().pack(*tensors)


def test_a_layer_is_packed_by_as_many_threads_as_the_engine_has() -> None:
    """Also by a thread that computes for the first time, while an activation of the engine has fewer."""
    model, threads = Fused(torch.float32), torch.get_num_threads()
    layer = model.model.layers[0].attn.qkv_proj
    layer.weight_scale = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    packed = Counting(layer)
    try:
        torch.set_num_threads(3)
        weights = HeldWeights(model, shapes_with_scales(SHAPES), [packed])
        torch.set_num_threads(1)
        with ThreadPoolExecutor(1) as beside:
            whole = {"model.layers.0.attn.q_proj.weight": torch.ones(4, 4)}
            beside.submit(weights.prepare, make_patch(whole).read()).result()
    finally:
        torch.set_num_threads(threads)
    assert packed.threads == 3


@pytest.mark.parametrize("leaf", ["weight", "weight_scale"])
def test_a_layer_is_packed_anew_when_its_weight_or_its_scales_change(leaf: str) -> None:
    model = Fused(torch.float32)
    layer = model.model.layers[0].attn.qkv_proj
    layer.weight = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.int8), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    packed = Scaled(layer)
    weights = HeldWeights(model, shapes_with_scales(SHAPES), [packed])
    plain = {
        f"model.layers.0.attn.{part}.weight": torch.randn(SHAPES[f"model.layers.0.attn.{part}.weight"])
        for part in PARTS["qkv_proj"]
    }
    old = EIGHT_BITS["int8"].model(model_of(plain))
    assert take(weights, PatchFile({}, old, since=None, root="1")) == model_digests(old)
    x = torch.eye(4)
    assert torch.equal(packed.product(x, None).t(), layer.weight.float() * layer.weight_scale[:, None])
    before, name = packed.product(x, None), f"model.layers.0.attn.k_proj.{leaf}"
    new = old | {name: Bits(old[name].dtype, old[name].shape, old[name].data ^ 1)}
    weights.prepare(PatchFile(old, new, since="1", root="2").read())
    assert torch.equal(packed.product(x, None), before)
    weights.take()
    weights.settle()
    assert weights.digests() == model_digests(new)
    after = packed.product(x, None)
    assert torch.equal(after.t(), layer.weight.float() * layer.weight_scale[:, None])
    assert (after != before).any(0).tolist() == [False] * 4 + [True] * 2 + [False] * 2


@pytest.mark.parametrize("without", ["k_proj.bias", "norm.weight", "gate_proj.weight", ""])
def test_a_parameter_that_no_tensor_fills_is_named(without: str) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if not without or without not in name}
    weights = HeldWeights(Fused(torch.float32), shapes, [])
    if not without:
        weights.check_filled()  # padding of the vocabulary is no part
        return
    with pytest.raises(EngineError, match=r"computes with .*, and the model has no tensor for it") as raised:
        weights.check_filled()
    assert raised.value.lasting

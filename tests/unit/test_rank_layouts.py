"""Models divided by tensors, layers and experts: no weight is missing, and each rank has its digests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.weights.bits import Bits, empty
from infra.weights.digest import digest_of, model_digests
from infra.weights.layer_stretches import LayerStretches
from infra.weights.patch import PatchFile
from infra.weights.slices import SliceDigests, Slicing, slice_name
from infra.weights.weights_error import WeightsError
from schemas.rank_layout import RankLayout
from tests.factories import make_model_files, make_spec

WIDTH, INNER, HEADS = 8, 16, 4
_Shapes = dict[str, tuple[int, ...]]


def shapes_of(layers: int, experts: int, *, tied: bool, folder: bool) -> _Shapes:
    """The tensors of a mixture, by the trainer's names, or by those of a folder."""
    shapes: _Shapes = {"model.embed_tokens.weight": (10, WIDTH), "model.norm.weight": (WIDTH,)}
    if not tied:
        shapes["lm_head.weight"] = (10, WIDTH)
    for number in range(layers):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (WIDTH,), f"{layer}.self_attn.q_proj.weight": (WIDTH, WIDTH),
            f"{layer}.self_attn.o_proj.weight": (WIDTH, WIDTH), f"{layer}.mlp.gate.weight": (experts, WIDTH),
            f"{layer}.mlp.shared_expert.down_proj.weight": (WIDTH, INNER),
            f"{layer}.mlp.shared_expert_gate.weight": (1, WIDTH),
        }  # fmt: skip
        if not folder:
            shapes[f"{layer}.mlp.experts.gate_up_proj"] = (experts, 2 * INNER, WIDTH)
            shapes[f"{layer}.mlp.experts.down_proj"] = (experts, WIDTH, INNER)
            continue
        for expert in range(experts):
            one = f"{layer}.mlp.experts.{expert}"
            shapes |= {f"{one}.{part}_proj.weight": (INNER, WIDTH) for part in ("gate", "up")}
            shapes[f"{one}.down_proj.weight"] = (WIDTH, INNER)
    return shapes


@st.composite
def cases(draw: st.DrawFn) -> tuple[Slicing, _Shapes]:
    tensor, layers = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 6))
    layout = RankLayout(tensor, draw(st.integers(1, layers)), tensor > 1 and draw(st.booleans()))
    tied, experts = draw(st.booleans()), draw(st.sampled_from([4, 8]))
    shapes = shapes_of(layers, experts, tied=tied, folder=draw(st.booleans()))
    return Slicing(layout, HEADS, HEADS, layers, experts, tied), shapes


def drawn(shape: tuple[int, ...], seed: int) -> Bits:
    bits = empty("F32", shape)
    bits.data[:] = np.random.default_rng(seed).integers(0, 1 << 32, bits.data.size, np.uint32)
    return bits


def part_of(slicing: Slicing, name: str, array: np.ndarray, rank: int) -> np.ndarray:
    """What a rank holds of an array of a tensor's shape."""
    mine = slicing.slice(name, array.shape, rank)
    if mine is None:
        return array
    places = np.concatenate([np.arange(begin, end) for begin, end in mine.spans])
    return np.take(array, places, axis=mine.axis)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_each_weight_is_on_as_many_ranks_as_compute_with_it(case: tuple[Slicing, _Shapes]) -> None:
    slicing, shapes = case
    layout = slicing.layout
    assert not list(slicing.problems(shapes))
    for name, shape in shapes.items():
        places = np.arange(np.prod(shape)).reshape(shape)
        counts = np.zeros(places.size, np.int64)
        for rank in range(layout.ranks):
            if slicing.holds(name, rank):
                counts[part_of(slicing, name, places, rank).reshape(-1)] += 1
        whole = slicing.slice(name, shape, 0) is None and not (layout.whole_experts and ".experts." in name)
        twice = 2 if slicing.tied and layout.stretches > 1 and "embed" in name else 1
        assert (counts == (layout.tensor if whole else 1) * twice).all(), name


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 99))
def test_patched_ranks_have_the_digests_that_are_expected_and_no_others(
    case: tuple[Slicing, _Shapes], changed: float, seed: int
) -> None:
    slicing, shapes = case
    old = {name: drawn(shape, seed) for name, shape in shapes.items()}
    new = {}
    for number, (name, bits) in enumerate(old.items()):
        pick = np.random.default_rng(seed + number).random(bits.data.size) < changed
        new[name] = Bits("F32", bits.shape, np.where(pick, drawn(bits.shape, seed + 1).data, bits.data))
    patch = PatchFile(old, new, since="a", root="b").read()
    found = {}
    for rank in range(slicing.ranks):
        mine = slicing.patch(patch, rank)
        held = slicing.shapes(shapes, rank)
        assert set(mine.parts) <= set(held)
        for name, shape in held.items():
            values = part_of(slicing, name, old[name].data.reshape(old[name].shape), rank)
            have = Bits("F32", tuple(shape), np.ascontiguousarray(values).reshape(-1).copy())
            if name in mine.parts:
                mine.parts[name].apply(have.data)
            found[slice_name(name, rank)] = digest_of(have)
    assert found == SliceDigests(slicing).of(new, model_digests(new))


@pytest.mark.parametrize("whole_experts", [False, True])
def test_a_folders_names_and_the_trainers_names_mean_the_same_slices(whole_experts: bool) -> None:
    slicing = Slicing(RankLayout(2, 1, whole_experts), HEADS, HEADS, 1, 4)
    gate_up, down = drawn((4, 2 * INNER, WIDTH), 1), drawn((4, WIDTH, INNER), 2)
    layer = "model.layers.0.mlp.experts"
    for rank in range(2):
        both = part_of(slicing, f"{layer}.gate_up_proj", gate_up.data.reshape(gate_up.shape), rank)
        one = part_of(slicing, f"{layer}.down_proj", down.data.reshape(down.shape), rank)
        experts = slicing.experts_of(rank)
        assert [slicing.holds(f"{layer}.{number}.w1.weight", rank) for number in range(4)] == [
            number in experts for number in range(4)
        ]
        for place, expert in enumerate(experts):
            halves = gate_up.data.reshape(4, 2, INNER, WIDTH)[expert]
            parts = [
                part_of(slicing, f"{layer}.{expert}.{name}.weight", half, rank)
                for name, half in zip(("gate_proj", "w3"), halves, strict=True)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), both[place])
            mine = part_of(
                slicing, f"{layer}.{expert}.w2.weight", down.data.reshape(down.shape)[expert], rank
            )
            np.testing.assert_array_equal(mine, one[place])


@pytest.mark.parametrize(
    ("layers", "stretches", "sizes"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 3, [2, 3, 2]), (8, 3, [3, 3, 2]), (3, 3, [1, 1, 1]), (4, 1, [4])],
)
def test_the_last_stretch_has_no_more_layers_than_others(
    layers: int, stretches: int, sizes: list[int]
) -> None:
    assert LayerStretches(layers, stretches, tied=False).sizes == sizes


def test_a_tensor_that_nobody_knows_is_named() -> None:
    stretches = LayerStretches(4, 2, tied=False)
    with pytest.raises(WeightsError, match=r"model\.other\.weight is in no layer.*pipeline_parallel: 1"):
        stretches.holds("model.other.weight", 0)
    with pytest.raises(WeightsError, match="is of layer 4, and the model has 4"):
        stretches.holds("model.layers.4.mlp.up_proj.weight", 0)


@pytest.mark.parametrize(
    ("slicing", "message"),
    [
        (Slicing(RankLayout(2, 1, True), 4, 4, 2, 5), r"expert_parallel: its 5 experts .* among 2 ranks"),
        (Slicing(RankLayout(2, 1, True), 4, 4, 2), r"expert_parallel: it is no mixture of experts"),
        (Slicing(RankLayout(1, 3), 4, 4, 2), r"pipeline_parallel: its 2 layers .* into 3 stretches"),
        (Slicing(RankLayout(1, 2), 4, 4, 2), r"pipeline_parallel: tensor model\.other\.weight is in no"),
    ],
)
def test_layouts_that_do_not_fit_a_model_are_refused_by_their_setting(slicing: Slicing, message: str) -> None:
    found = list(slicing.problems({"model.other.weight": (4,)}))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("; ".join(found))


def test_a_norm_of_all_heads_needs_a_head_of_keys_for_each_rank() -> None:
    shapes = {f"model.layers.0.self_attn.{name}_norm.weight": (size,) for name, size in (("q", 16), ("k", 8))}
    (wrong,) = Slicing(RankLayout(4), 4, 2).problems(shapes)
    assert wrong == (
        "generator.tensor_parallel: it norms keys over all heads, which vLLM can't compute where 2 heads are "
        "fewer than 4 ranks"
    )
    assert not list(Slicing(RankLayout(2), 4, 2).problems(shapes))
    of_each = dict.fromkeys(shapes, (4,))
    assert not list(Slicing(RankLayout(4), 4, 2).problems(of_each))


def test_the_embedding_is_on_first_and_last_ranks_if_files_have_no_head(tmp_path: Path) -> None:
    folder = make_model_files(tmp_path)
    config: Mapping[str, object] = {"num_attention_heads": 2, "num_hidden_layers": 3, "num_local_experts": 4}
    (folder / "config.json").write_text(json.dumps(config))
    slicing = Slicing.of(folder, RankLayout(1, 3))
    assert (slicing.tied, slicing.layers, slicing.experts) == (True, 3, 4)
    assert [slicing.holds("model.embed_tokens.weight", rank) for rank in range(3)] == [True, False, True]
    assert [slicing.holds("model.norm.weight", rank) for rank in range(3)] == [False, False, True]


def test_settings_say_the_layout() -> None:
    section = make_spec(
        generator={"tensor_parallel": 2, "pipeline_parallel": 3, "expert_parallel": True}
    ).generator
    assert section.layout == RankLayout(2, 3, whole_experts=True)
    assert (section.devices, section.gpus) == (6, 6)
    assert [section.layout.column(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [section.layout.stretch(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert make_spec().generator.layout == RankLayout()
    with pytest.raises(
        ValueError, match="expert_parallel divides experts among the ranks of tensor_parallel"
    ):
        make_spec(generator={"expert_parallel": True})
    with pytest.raises(ValueError, match="pipeline_parallel"):
        make_spec(generator={"engine": "served", "pipeline_parallel": 2})

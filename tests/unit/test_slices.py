"""Slices of tensors: all ranks' together are the whole, and a patch means the same for both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.weights.bits import Bits, empty
from infra.weights.digest import digest_of, model_digests
from infra.weights.patch import PatchFile
from infra.weights.slices import SliceDigests, Slicing, slice_name
from infra.weights.weights_error import WeightsError
from schemas.rank_layout import RankLayout

HEAD, WIDTH, INNER = 4, 12, 8
LAYER = "model.layers.0"


def shapes_of(heads: int, kv_heads: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    return {
        "model.embed_tokens.weight": (vocabulary, WIDTH), "lm_head.weight": (vocabulary, WIDTH),
        f"{attention}.q_proj.weight": (heads * HEAD, WIDTH), f"{attention}.q_proj.bias": (heads * HEAD,),
        f"{attention}.k_proj.weight": (kv_heads * HEAD, WIDTH),
        f"{attention}.v_proj.bias": (kv_heads * HEAD,),
        f"{attention}.o_proj.weight": (WIDTH, heads * HEAD), f"{attention}.o_proj.bias": (WIDTH,),
        f"{attention}.q_norm.weight": (HEAD,), f"{mlp}.gate_proj.weight": (INNER, WIDTH),
        f"{mlp}.up_proj.weight": (INNER, WIDTH), f"{mlp}.down_proj.weight": (WIDTH, INNER),
        "model.norm.weight": (WIDTH,), f"{attention}.rotary_emb.inv_freq": (HEAD // 2,),
    }  # fmt: skip


def drawn(dtype: str, shape: tuple[int, ...], seed: int) -> Bits:
    """Any bits."""
    bits = empty(dtype, shape)
    raw = np.random.default_rng(seed).integers(0, 256, bits.data.nbytes, np.uint8)
    bits.data[:] = raw.view(bits.data.dtype)
    return bits


def sliced(ranks: int, heads: int, kv_heads: int) -> Slicing:
    return Slicing(RankLayout(ranks), heads, kv_heads)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Slicing, dict[str, tuple[int, ...]]]:
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    heads = ranks * draw(st.sampled_from([1, 2]))
    kv_heads = draw(st.sampled_from([one for one in (1, 2, 4, 8, 16) if one <= heads and heads % one == 0]))
    return Slicing(RankLayout(ranks), heads, kv_heads), shapes_of(heads, kv_heads, draw(st.integers(1, 150)))


def held(slicing: Slicing, name: str, bits: Bits, rank: int) -> Bits:
    """What a rank holds of a tensor, by plain indexing."""
    mine = slicing.slice(name, bits.shape, rank)
    if mine is None:
        return bits
    places = np.concatenate([np.arange(begin, end) for begin, end in mine.spans])
    part = np.take(bits.data.reshape(bits.shape), places, axis=mine.axis)
    return Bits(bits.dtype, part.shape, np.ascontiguousarray(part).reshape(-1))


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(["F32", "BF16"]), st.integers(0, 99))
def test_all_slices_together_are_the_tensor(
    case: tuple[Slicing, dict[str, tuple[int, ...]]], dtype: str, seed: int
) -> None:
    slicing, shapes = case
    assert not list(slicing.problems(shapes))
    for name, shape in shapes.items():
        covered = np.zeros(shape, dtype=np.int64)
        for rank in range(slicing.ranks):
            mine = slicing.slice(name, shape, rank)
            assert slicing.shapes({name: shape}, rank)[name] == (mine.shape(shape) if mine else shape)
            if mine is None:
                covered += 1
            else:
                for begin, end in mine.spans:
                    np.moveaxis(covered, mine.axis, 0)[begin:end] += 1
        copies = 1
        if ".k_proj" in name or ".v_proj" in name:
            copies = max(1, slicing.ranks // slicing.kv_heads)
        elif slicing.slice(name, shape, 0) is None:
            copies = slicing.ranks
        assert (covered == copies).all(), name


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(["F32", "BF16"]), st.sampled_from([0.0, 0.02, 0.1, 1.0]), st.integers(0, 99))
def test_a_patch_of_slices_makes_the_slices_of_the_patched_whole(
    case: tuple[Slicing, dict[str, tuple[int, ...]]], dtype: str, changed: float, seed: int
) -> None:
    slicing, shapes = case
    old = {name: drawn(dtype, shape, seed) for name, shape in shapes.items()}
    new = {}
    for number, (name, bits) in enumerate(old.items()):
        pick = np.random.default_rng(seed + number).random(bits.data.size) < changed
        values = np.where(pick, drawn(dtype, bits.shape, seed + 1).data, bits.data)
        new[name] = Bits(dtype, bits.shape, values)
    patch = PatchFile(old, new, since="a", root="b").read()
    expected = SliceDigests(slicing).of(new, model_digests(new))
    for rank in range(slicing.ranks):
        mine = slicing.patch(patch, rank)
        assert (mine.since, mine.root, set(mine.parts)) == ("a", "b", set(patch.parts))
        for name in shapes:
            bits = held(slicing, name, old[name], rank)
            have = Bits(bits.dtype, bits.shape, bits.data.copy())
            if name in mine.parts:
                assert mine.parts[name].shape == have.shape
                mine.parts[name].apply(have.data)
            assert digest_of(have) == expected[slice_name(name, rank)], name


def test_positions_of_large_tensors_need_8_bytes_and_are_kept_so() -> None:
    slicing = Slicing(RankLayout(2), 2, 2)
    old = drawn("F32", (8, 4), 0)
    new = Bits("F32", (8, 4), old.data + np.uint32(1) * (np.arange(32) % 11 == 5))
    (name,) = names = ["model.layers.0.mlp.down_proj.weight"]
    part = PatchFile({name: old}, {name: new}, since="a", root="b").read().parts[name]
    wide = type(part)(part.dtype, part.shape, part.positions.astype(np.int64), part.values)  # type: ignore[union-attr]
    for rank in range(2):
        mine = slicing.slice(names[0], (8, 4), rank)
        assert mine is not None
        found = mine.patch(wide)
        assert found.positions is not None and found.positions.dtype == np.int64
        have = held(slicing, name, old, rank)
        have = Bits(have.dtype, have.shape, have.data.copy())
        found.apply(have.data)
        np.testing.assert_array_equal(have.data, held(slicing, name, new, rank).data)


def test_slices_of_tensors_that_did_not_change_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slicing = Slicing(RankLayout(2), 2, 1)
    model = {name: drawn("F32", shape, 1) for name, shape in shapes_of(2, 1, 70).items()}
    digests = SliceDigests(slicing)
    first = digests.of(model, model_digests(model))
    hashed: list[int] = []
    monkeypatch.setattr("infra.weights.slices.digest_of", lambda bits: hashed.append(1) or "new")
    name = f"{LAYER}.mlp.up_proj.weight"
    model[name] = drawn("F32", model[name].shape, 2)
    second = digests.of(model, model_digests(model))
    assert len(hashed) == 2
    assert {one for one in first if first[one] != second[one]} == {slice_name(name, rank) for rank in (0, 1)}


def test_an_engine_of_one_rank_holds_whole_tensors() -> None:
    model = {"model.layers.0.mlp.experts.0.up_proj.weight": drawn("F32", (2, 2), 0)}
    assert SliceDigests(None).of(model, model_digests(model)) == model_digests(model)
    assert Slicing.for_engine(Path("nowhere"), RankLayout()) is None


@pytest.mark.parametrize(
    ("slicing", "changes", "message"),
    [
        (sliced(4, 6, 6), {}, "6 attention heads can't be divided among 4 ranks"),
        (sliced(6, 12, 4), {}, "4 heads of keys and values can neither be divided among 6 ranks nor"),
        (sliced(3, 3, 3), {}, "multiple of 64 rows, which can't be divided among 3 ranks"),
        (sliced(2, 2, 2), {"up_proj": (9, WIDTH)}, r"up_proj.weight \[9, 12\] can't be divided among 2"),
        (sliced(2, 2, 2), {"experts.0.up_proj": (9, WIDTH)}, r"experts.0.up_proj.weight \[9, 12\] can't"),
        (sliced(2, 2, 2), {"experts.0.router": (8, WIDTH)}, "router.weight can't be divided .* no layer"),
        (sliced(2, 2, 2), {"fc1": (8, WIDTH)}, "fc1.weight can't be divided .* it is no layer known here"),
        (sliced(2, 2, 2), {"convolution": (8, 4, 4)}, "convolution.weight can't be divided"),
    ],
)  # fmt: skip
def test_models_that_ranks_can_not_divide_are_refused_with_the_reason(
    slicing: Slicing, changes: dict[str, tuple[int, ...]], message: str
) -> None:
    shapes = {f"{LAYER}.mlp.gate_proj.weight": (INNER, WIDTH)}
    shapes |= {f"{LAYER}.mlp.{name}.weight": shape for name, shape in changes.items()}
    found = list(slicing.problems(shapes))
    assert found
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("; ".join(found))


@pytest.mark.parametrize(
    "config",
    [
        "{", "[]", "{}", '{"num_attention_heads": "2"}', '{"num_attention_heads": true}',
        '{"num_attention_heads": 0}', '{"num_attention_heads": 4, "num_key_value_heads": -1}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_a_config_that_does_not_say_the_heads_is_named(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(WeightsError, match=r"config\.json does not say how many attention heads"):
        Slicing.of(tmp_path, RankLayout(2))


def test_keys_and_values_have_as_many_heads_as_queries_unless_the_config_says_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    assert Slicing.of(tmp_path, RankLayout(2)) == Slicing(RankLayout(2), 4, 4)
    with pytest.raises(WeightsError, match="does not say"):
        Slicing.of(tmp_path / "nowhere", RankLayout(2))

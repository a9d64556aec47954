"""The codec of weights: bit-exact for all patterns, whatever scans them, and never a wrong weight."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.choices import NUMBA, ChoiceError
from infra.weights import bits
from infra.weights.arrays import Array
from infra.weights.bits import Bits, kind_of, model_of
from infra.weights.codec import chunks, decoding, encoding, groups, scan_fast, scan_plain, streams, tiles
from infra.weights.codec.bands import MOST_BANDS, band_edges, band_table
from infra.weights.codec.decoding import StaleTile
from infra.weights.codec.scan import SCAN_VARIABLE, Scan, one_by_one, scanner
from infra.weights.codec.tiles import tile_hash
from infra.weights.weights_error import WeightsError
from tests.damage import cuts_and_flips

TYPES = ["BF16", "F16", "F32", "U8", "I64"]
PLAIN = scanner("plain")


def drawn(dtype: str, count: int, changed: float, seed: int) -> tuple[Array, Array]:
    """Any bit patterns at all, a part of which become any others."""
    rng, kind = np.random.default_rng(seed), kind_of(dtype)
    old, other = (rng.integers(0, 1 << kind.bits, count, dtype=np.uint64).astype(kind.unsigned) for _ in "ab")
    return old, np.where(rng.random(count) < changed, other, old)


def like_training(count: int, seed: int, rate: float = 0.002) -> tuple[Array, Array]:
    """bf16 weights of which those with low exponents change most, mostly by one place."""
    rng = np.random.default_rng(seed)
    old = (rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    likely = np.minimum(0.8, rate * 2.0 ** (121 - ((old >> 7) & 255).astype(float)))
    step = np.where(rng.random(count) < 0.9, 1, 2) * rng.choice([-1, 1], count)
    return old, np.where(rng.random(count) < likely, old + step.astype(np.uint16), old)


@pytest.mark.parametrize("dtype", TYPES)
def test_all_patterns_have_a_place_of_their_own(dtype: str) -> None:
    kind = kind_of(dtype)
    if kind.bits > 16:
        some = drawn(dtype, 1 << 16, 1.0, 0)[0]
    else:
        some = np.arange(1 << kind.bits).astype(kind.unsigned)
    places = bits.ordered(some, kind)
    assert len(np.unique(places)) == len(np.unique(some))
    assert np.array_equal(bits.unordered(places, kind), some)


def test_neighbours_in_the_order_of_numbers_are_one_step_apart() -> None:
    numbers = np.array([-np.inf, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, np.inf], np.float32)
    places = bits.ordered(numbers.view(np.uint32), kind_of("F32")).astype(np.int64)
    assert np.all(np.diff(places) > 0)
    assert np.diff(places)[2:5].tolist() == [1, 1, 1]


def edges(dtype: str, bands: int) -> Array:
    """Bands of about the same width."""
    exponents = kind_of(dtype).exponents
    return np.unique(np.arange(bands) * exponents // bands).astype(np.uint8)


@pytest.mark.parametrize("dtype", TYPES)
@given(
    st.integers(0, 99), st.sampled_from([0.0, 0.001, 0.3, 1.0]), st.integers(1, MOST_BANDS),
    st.sampled_from([1, 63, 64, 65, 3000]),
)  # fmt: skip
@settings(deadline=None, max_examples=20)
def test_both_scans_are_the_same_and_lead_back(
    dtype: str, seed: int, changed: float, bands: int, count: int
) -> None:
    kind, band = kind_of(dtype), edges(dtype, bands)
    old, new = drawn(dtype, count, changed, seed)
    for every in (1, 3):
        assert np.array_equal(
            scan_fast.census(old, new, kind, every), scan_plain.census(old, new, kind, every)
        )
    one, other = scan_fast.scan(old, new, kind, band, count), scan_plain.scan(old, new, kind, band, count)
    assert one is not None
    for name in ("begins", "ends", "gaps", "steps"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert getattr(one, name).dtype == getattr(other, name).dtype, name
    assert other is not None
    assert (one.before, one.after) == (other.before, other.after) == (tile_hash(old), tile_hash(new))
    if one.gaps.size:
        assert scan_fast.scan(old, new, kind, band, one.gaps.size - 1) is None
        assert scan_plain.scan(old, new, kind, band, one.gaps.size - 1) is None
    for module in (scan_fast, scan_plain):
        data = old.copy()
        assert module.apply(data, kind, band, one)
        assert np.array_equal(data, new)
        assert module.apply(data, kind, band, one) == (not one.gaps.size)
        assert np.array_equal(data, new)


@pytest.mark.parametrize("module", [scan_fast, scan_plain])
def test_changes_that_lead_elsewhere_are_undone(module: Scan) -> None:
    kind, band = kind_of("BF16"), edges("BF16", 5)
    old, new = drawn("BF16", 1000, 0.1, 0)
    changes = scan_plain.scan(old, new, kind, band, 1000)
    assert changes is not None
    for place, more in itertools.product(range(changes.gaps.size), (1, 1000)):
        gaps, data = changes.gaps.copy(), old.copy()
        gaps[place] += more  # to a neighbour, or to where there is none
        assert not module.apply(data, kind, band, replace(changes, gaps=gaps))
        assert np.array_equal(data, old)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.sampled_from([np.uint8, np.uint16, np.uint32]))
@settings(deadline=None)
def test_streams_lead_back(numbers: list[int], dtype: type) -> None:
    several = [np.array(numbers).astype(dtype), np.zeros(3000, dtype), np.arange(5000).astype(dtype)]
    for library in (streams._pcodec(), None):
        with patch.object(streams, "_pcodec", lambda library=library: library):
            data = b"".join(map(streams.pack_streams, several))
        reader = streams.StreamsReader(data, "it")
        for one in several:
            assert np.array_equal(reader.numbers(5000), one)
        assert not reader.rest()


def test_a_stream_of_a_coder_that_is_not_installed_says_so() -> None:
    data = streams.pack_streams(np.random.default_rng(0).geometric(0.1, 4000).astype(np.uint32))
    with (
        patch.object(streams, "_pcodec", lambda: None),
        pytest.raises(WeightsError, match="pip install pcodec"),
    ):
        streams.StreamsReader(data, "it").numbers(4000)


def model(
    *sizes: tuple[str, int], changed: float = 0.02, seed: int = 0
) -> tuple[dict[str, Bits], dict[str, Bits]]:
    old, new = {}, {}
    for number, (dtype, count) in enumerate(sizes):
        before, after = drawn(dtype, count, changed, seed + number)
        old[f"t{number}"], new[f"t{number}"] = (Bits(dtype, (count,), data) for data in (before, after))
    return old, new


def copied(some: dict[str, Bits]) -> dict[str, Bits]:
    return {name: Bits(one.dtype, one.shape, one.data.copy()) for name, one in some.items()}


def same(one: dict[str, Bits], other: dict[str, Bits]) -> bool:
    return all(np.array_equal(one[name].data, other[name].data) for name in one)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (tiles, groups, chunks, encoding, decoding):
        monkeypatch.setattr(module, "TILE", 256)
    monkeypatch.setattr(encoding, "RUN", 2048)
    yield


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("changed", [0.0, 0.01, 0.5, 1.0])
def test_a_model_leads_to_the_next_one(small_tiles: None, threads: int, changed: float) -> None:
    sizes = [("BF16", 5000), ("F32", 700), ("U8", 300), ("BF16", 1), ("F16", 0), ("F16", 1100)]
    old, new = model(*sizes, changed=changed)
    for base in (old, None):
        found = list(chunks.encode_model(base, new, threads=threads, size=2000))
        assert len(found) > 1 or (base is not None and changed < 0.5)
        held = copied(old)
        touched = [
            tile for chunk in found for tile in chunks.decode_chunk(chunk, held, "it", threads=threads)
        ]
        assert same(held, new)
        assert len(touched) == len(set(touched))
        again = [tile for chunk in found for tile in chunks.decode_chunk(chunk, held, "it")]
        assert not again, "what is new already stays"


def test_threads_and_scans_make_the_same_bytes(small_tiles: None) -> None:
    old, new = model(("BF16", 9000), ("F32", 3000), changed=0.1)
    one = list(chunks.encode_model(old, new))
    assert one == list(chunks.encode_model(old, new, threads=3))
    with patch.object(encoding, "scanner", lambda: PLAIN):
        assert one == list(chunks.encode_model(old, new))


def test_after_a_crash_decoding_goes_on(small_tiles: None) -> None:
    old, new = model(("BF16", 3000), changed=0.05)
    (chunk,) = chunks.encode_model(old, new)
    held, left, tried = copied(old), 0, 0

    class Died(Exception):
        pass

    def dies(*args: Any) -> Any:
        nonlocal left
        left -= 1
        undo = scan_plain.apply(*args) if left or tried % 2 else None  # it dies before that, or behind
        if not left:
            raise Died
        return undo

    dying = SimpleNamespace(census=scan_plain.census, scan=scan_plain.scan, apply=dies)
    with patch.object(decoding, "scanner", lambda: one_by_one(dying)):
        for tried in range(20):
            left = tried + 1
            try:
                chunks.decode_chunk(chunk, held, "it")
                break
            except Died:
                pass
    assert same(held, new)
    assert tried == 12


def test_bits_that_a_change_is_not_for_stay_as_they_are(small_tiles: None) -> None:
    old, new = model(("BF16", 2000), changed=0.05)
    (chunk,) = chunks.encode_model(old, new)
    held = copied(old)
    held["t0"].data[700] ^= 1
    before = held["t0"].data[512:768].copy()
    with pytest.raises(StaleTile, match=r"t0\[512:768\] holds other bits than those that v7 is for"):
        chunks.decode_chunk(chunk, held, "v7")
    assert np.array_equal(held["t0"].data[512:768], before)


def test_every_flipped_bit_and_every_cut_is_an_error(small_tiles: None) -> None:
    """Nothing but the old or the new bits is ever written."""
    old, new = model(("BF16", 600), ("F32", 60), changed=0.05)
    for base in (old, None):
        (chunk,) = chunks.encode_model(base, new)
        for some in cuts_and_flips(chunk):
            held = copied(old)
            with contextlib.suppress(WeightsError):
                chunks.decode_chunk(some, held, "it")
            for name, one in held.items():
                for start in range(0, one.data.size, 256):
                    part = slice(start, start + 256)
                    assert any(np.array_equal(one.data[part], whole[name].data[part]) for whole in (old, new))


@pytest.mark.parametrize("count", [64, 1000, 1 << 14])
def test_where_all_changes_it_leads_back_and_damage_is_seen(
    small_tiles: None, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(streams, "_FEW", 8)
    rng = np.random.default_rng(count)
    before = rng.normal(0, 0.02, count).astype(np.float32)
    after = before - (1e-6 * rng.uniform(-1, 1, count)).astype(np.float32)
    old, new = ({"t": Bits("F32", (count,), one.view(np.uint32).copy())} for one in (before, after))
    found = list(chunks.encode_model(old, new))
    assert {head.mode for chunk in found for head, _ in chunks.heads_of(chunk, "it")} == {groups.BANDED}
    held = copied(old)
    for chunk in found:
        chunks.decode_chunk(chunk, held, "it")
    assert same(held, new)
    for some in cuts_and_flips(found[0]) if count == 64 else ():
        held = copied(old)
        with contextlib.suppress(WeightsError):
            chunks.decode_chunk(some, held, "it")
        for start in range(0, count, 256 // tiles.PARTS):
            part = slice(start, start + 256 // tiles.PARTS)
            assert any(np.array_equal(held["t"].data[part], one["t"].data[part]) for one in (old, new))


def test_whole_tiles_are_tried_where_they_may_be_smaller(small_tiles: None) -> None:
    old, new = model(("F32", 4096), changed=1.0)
    new["t0"].data[:] = 0
    chunk, *_ = chunks.encode_model(old, new)
    assert {head.mode for head, _ in chunks.heads_of(chunk, "it")} == {groups.WHOLE}


def test_models_with_other_tensors_have_no_difference() -> None:
    old, new = model(("BF16", 10), ("F32", 10))
    with pytest.raises(WeightsError, match="only the new model has a tensor t1"):
        list(chunks.encode_model({"t0": old["t0"]}, new))
    with pytest.raises(WeightsError, match=r"t1 is BF16 \[10\] in the old model and F32 \[10\]"):
        list(chunks.encode_model({"t0": old["t0"], "t1": old["t0"]}, new))


def entropy(old: Array, new: Array) -> float:
    """Bytes per changed element that positions and steps need at least, given the exponents."""
    places = [bits.ordered(some, kind_of("BF16")) for some in (old, new)]
    steps, exponents, total = places[1] - places[0], (old >> 7) & 255, 0.0
    for exponent in np.unique(exponents):
        mine = steps[exponents == exponent]
        _, counts = np.unique(mine, return_counts=True)
        total -= float(np.sum(counts * np.log2(counts / mine.size)))
    return total / 8 / float(np.sum(old != new))


def test_it_is_close_to_the_entropy() -> None:
    old, new = like_training(8 * tiles.TILE, 0)
    models = [{"w": Bits("BF16", (some.size,), some)} for some in (old, new)]
    (chunk,) = chunks.encode_model(models[0], models[1])
    found = len(chunk) / np.sum(old != new)
    assert found <= 1.05 * entropy(old, new)


@pytest.mark.parametrize(("spread", "most"), [(0.0, 0.67), (1.0, 0.70)])
def test_a_keyframe_is_close_to_what_exponents_say(spread: float, most: float) -> None:
    """Also where each row has a size of its own."""
    draw = np.random.default_rng(3)
    weights = draw.normal(0, 0.02, (1024, 1024)) * np.exp(draw.normal(0, spread, (1024, 1)))
    (whole,) = chunks.encode_model(None, model_of({"w": torch.from_numpy(weights).bfloat16()}), size=1 << 30)
    assert len(whole) <= most * 2 * weights.size


def test_bands_are_worth_what_they_cost() -> None:
    census = np.zeros((3, 256), np.int64)
    census[0, 100:104] = 1_000_000
    census[1:, 100:104] = [200_000, 200_100, 1_000, 990]
    assert band_edges(census).tolist() == [0, 102]
    assert band_edges(census // 100_000).tolist() == [0], "few changes: one band"
    census[2, 100] *= 2
    assert band_edges(census).tolist() == [0, 101, 102], "as many changes, but larger ones"
    census[0], census[1:] = 1_000_000_000, np.arange(256) * 1_000_000
    assert 8 < band_edges(census).size <= MOST_BANDS
    assert band_table(np.array([0, 102], np.uint8)).tolist() == [0] * 102 + [1] * 154


def test_what_scans_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (SCAN_VARIABLE, NUMBA.variable):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(NUMBA.variable, "plain")
    assert scanner().census is scan_plain.census
    monkeypatch.delenv(NUMBA.variable)
    assert scanner().census is scanner("compiled").census is scan_fast.census
    monkeypatch.setenv(SCAN_VARIABLE, "plain")
    assert scanner().census is scan_plain.census
    monkeypatch.setenv(SCAN_VARIABLE, "fast")
    with pytest.raises(
        ChoiceError, match="STREAMRL_SCAN=fast is not allowed: set it to one of compiled, plain"
    ):
        scanner()

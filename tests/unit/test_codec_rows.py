"""Tensors of which few rows change: only these are coded, and nothing but old or new bits is ever written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.weights.arrays import Array
from infra.weights.bits import Bits, model_of
from infra.weights.codec import chunks, decoding, encoding, groups, rows, tiles
from infra.weights.codec.groups import ROWED
from infra.weights.weights_error import WeightsError
from tests.bench.delta import entropy_rows
from tests.damage import cuts_and_flips

Pair = tuple[dict[str, Bits], dict[str, Bits]]


def embedding(count: int, row: int, share: float, *, rate: float = 1e-3, seed: int = 0) -> Pair:
    """bf16 weights of which a share of the rows moves."""
    draw = np.random.default_rng(seed)
    before = draw.normal(0, 0.02, (count, row))
    moves = draw.random((count, 1)) < share
    after = before + np.where(moves, draw.normal(0, rate, (count, row)), 0)
    old, new = (model_of({"e": torch.from_numpy(some).bfloat16()}) for some in (before, after))
    return dict(old), dict(new)


def modes(found: list[bytes]) -> set[int]:
    return {head.mode for chunk in found for head, _ in chunks.heads_of(chunk, "it")}


def copied(some: dict[str, Bits]) -> dict[str, Bits]:
    return {name: Bits(one.dtype, one.shape, one.data.copy()) for name, one in some.items()}


def decoded(found: list[bytes], old: dict[str, Bits]) -> Array:
    """Twice: after a crash all is simply decoded again."""
    held = copied(old)
    for chunk in [*found, *found]:
        chunks.decode_chunk(chunk, held, "it")
    return held["e"].data


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (tiles, groups, chunks, encoding, decoding):
        monkeypatch.setattr(module, "TILE", 4096)
    yield


def test_it_is_close_to_what_a_bound_needs_that_knows_the_rows() -> None:
    """A code that is blind to rows needs 1.25 of it."""
    old, new = embedding(16_000, 896, 0.05, rate=3e-6)
    found = list(chunks.encode_model(old, new))
    assert modes(found) == {ROWED}
    assert np.array_equal(decoded(found, old), new["e"].data)
    changed = float(np.sum(old["e"].data != new["e"].data))
    assert sum(map(len, found)) / changed <= 1.05 * entropy_rows(old, new)


@given(
    st.integers(64, 400), st.integers(64, 200), st.sampled_from([0.0, 0.01, 0.1, 0.4, 1.0]), st.integers(0, 5)
)
@settings(deadline=None, max_examples=60)
def test_any_rows_lead_back(count: int, row: int, share: float, seed: int) -> None:
    """Rows begin before their tile and end behind it, too."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (tiles, groups, chunks, encoding, decoding):
            patched.setattr(module, "TILE", 4096)
        old, new = embedding(count, row, share, seed=seed)
        assert np.array_equal(decoded(list(chunks.encode_model(old, new)), old), new["e"].data)


def test_where_changes_lie_anywhere_rows_are_not_told_apart() -> None:
    draw = np.random.default_rng(0)
    old = draw.integers(0, 1 << 16, 1 << 20).astype(np.uint16)
    new = old.copy()
    new[draw.choice(new.size, 300, replace=False)] += 1  # a quarter of the rows
    pair = [{"e": Bits("BF16", (1024, 1024), some)} for some in (old, new)]
    assert rows.may_pay(pair[0]["e"], pair[1]["e"])
    assert ROWED not in modes(list(chunks.encode_model(*pair)))


def test_every_flipped_bit_and_every_cut_is_an_error(small_tiles: None) -> None:
    old, new = embedding(128, 64, 0.05)
    (chunk,) = chunks.encode_model(old, new)
    assert modes([chunk]) == {ROWED}
    for some in cuts_and_flips(chunk):
        held = copied(old)
        with contextlib.suppress(WeightsError):
            chunks.decode_chunk(some, held, "it")
        for start in range(0, held["e"].data.size, 4096):
            part = slice(start, start + 4096)
            assert any(np.array_equal(held["e"].data[part], one["e"].data[part]) for one in (old, new))


def test_rows_of_a_tensor_without_rows_are_refused(small_tiles: None) -> None:
    old, new = embedding(128, 64, 0.05)
    (chunk,) = chunks.encode_model(old, new)
    flat = {"e": Bits("BF16", (128 * 64,), old["e"].data.copy())}
    with pytest.raises(WeightsError, match="it tells rows apart where there are none"):
        chunks.decode_chunk(chunk, flat, "it")

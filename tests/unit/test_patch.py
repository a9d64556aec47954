"""Patches: from any bits to any bits, for any type; and through them from version to version."""

from __future__ import annotations

import gc
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.weights import patch as patches
from infra.weights.bits import NAMES, Bits, empty
from infra.weights.digest import digest_of, model_digests
from infra.weights.patch import PatchFile, patch_pieces, read_patch
from infra.weights.weights_error import WeightsError

Shapes = dict[str, tuple[str, tuple[int, ...]]]
TYPES = sorted(NAMES)
shapes = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    max_size=4,
)


def drawn(dtype: str, shape: tuple[int, ...], seed: int) -> Bits:
    """Any bit patterns at all: NaNs of all kinds, -0, infinities."""
    bits = empty(dtype, shape)
    bits.data[:] = (
        np.random.default_rng(seed).integers(0, 256, bits.data.nbytes, np.uint8).view(bits.data.dtype)
    )
    return bits


def moved(old: Bits, changed: float, seed: int) -> Bits:
    """Some elements become any others."""
    pick = np.random.default_rng(seed).random(old.data.size) < changed
    return Bits(old.dtype, old.shape, np.where(pick, drawn(old.dtype, old.shape, seed + 1).data, old.data))


@settings(max_examples=150, deadline=None)
@given(shapes, st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]), st.integers(0, 99), st.booleans())
def test_any_bits_become_any_others(like: Shapes, changed: float, seed: int, narrow: bool) -> None:
    old = {name: drawn(dtype, shape, seed) for name, (dtype, shape) in like.items()}
    new = {name: moved(bits, changed, seed + 7) for name, bits in old.items()}
    expected = model_digests(new)
    with patch.object(patches, "_NARROW", 1 << 31 if narrow else 2), patch.object(patches, "_STEP", 11):
        found = PatchFile(old, new, since="a", root="b").read()
        assert (found.since, found.root) == ("a", "b")
        assert set(found.parts) == {n for n, bits in old.items() if digest_of(bits) != expected[n]}
        copy = {name: Bits(bits.dtype, bits.shape, bits.data.copy()) for name, bits in old.items()}
        with TemporaryDirectory() as folder:
            (file := Path(folder) / "sent").write_bytes(b"".join(patch_pieces(found)))
            sent = read_patch(file)
        assert (sent.since, sent.root, set(sent.parts)) == ("a", "b", set(found.parts))
        sent.apply(copy)
        found.apply(old)
    assert model_digests(old) == expected == model_digests(copy)
    whole: dict[str, Bits] = {}
    PatchFile({}, new, since=None, root="b").read().apply(whole)
    assert model_digests(whole) == expected


def test_the_sign_of_a_zero_and_what_a_nan_carries_are_changes() -> None:
    tensors = [torch.tensor([0.0, 1.0] + [2.0] * 30), torch.tensor([-0.0, 1.0] + [2.0] * 30)]
    old, new = ({"w": Bits("F32", (32,), t.numpy().view(np.uint32))} for t in tensors)
    (part,) = PatchFile(old, new, since="a", root="b").read().parts.values()
    assert part.positions is not None and part.positions.tolist() == [0]
    assert part.values.tolist() == [0x80000000]
    nans = {"w": Bits("F32", (32,), new["w"].data.copy())}
    nans["w"].data[1] = 0x7FC00001
    PatchFile(new, nans, since="a", root="b").read().apply(new)
    assert new["w"].data[1] == 0x7FC00001


def test_what_many_elements_of_change_goes_whole_and_what_few_of_change_is_small() -> None:
    old = {"w": drawn("BF16", (1000, 1000), 0)}
    for changed, whole in ((0.03, False), (0.5, True)):
        new = {"w": moved(old["w"], changed, 1)}
        file = PatchFile(old, new, since="a", root="b")
        (part,) = file.read().parts.values()
        assert (part.positions is None) == whole
        differ = int((old["w"].data != new["w"].data).sum())
        assert file.path.stat().st_size < (2_000_000 if whole else 6 * differ) + 200


def test_a_tensor_of_another_shape_or_type_goes_whole() -> None:
    new = {"w": drawn("F32", (6, 4), 0)}
    for old in (drawn("F32", (4, 6), 0), drawn("I32", (6, 4), 0)):
        (part,) = PatchFile({"w": old}, new, since="a", root="b").read().parts.values()
        assert part.positions is None and part.shape == (6, 4)


def test_it_is_gone_with_its_object_and_not_with_its_readers() -> None:
    new = {"w": drawn("F32", (6, 4), 0)}
    file = PatchFile({}, new, since=None, root="b")
    path, found = file.path, file.read()
    assert path.exists()
    del file
    gc.collect()
    assert not path.exists()
    assert digest_of(Bits("F32", (6, 4), found.parts["w"].values)) == digest_of(new["w"])


@pytest.mark.parametrize("cut", [1, 8, 20, 10_000])
def test_what_is_no_patch_is_said(tmp_path: Path, cut: int) -> None:
    file = PatchFile({}, {"w": drawn("F32", (30, 4), 0)}, since=None, root="b")
    data = file.path.read_bytes()
    (tmp_path / "cut").write_bytes(data[: max(0, len(data) - cut)])
    with pytest.raises(WeightsError, match=r"cut can't be read as a patch of weights"):
        read_patch(tmp_path / "cut")

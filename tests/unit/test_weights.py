"""Weights versions: whole and verified, or not at all."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from infra.store import Missing, open_store
from infra.weights.digest import digests_of, file_digests, root_digest
from infra.weights.errors import WeightsError
from infra.weights.versions import WeightStore

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def weights(folder: Path, run: str = "r-1") -> WeightStore:
    return WeightStore(open_store(f"file://{folder}"), run)


def test_what_is_published_is_fetched_bit_by_bit(tmp_path: Path) -> None:
    manifest = weights(tmp_path).publish(3, TENSORS, trainer_epoch=1)
    assert manifest.root == root_digest(digests_of(TENSORS))
    found, tensors = weights(tmp_path).fetch(3, root=manifest.root)
    assert found == manifest
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert weights(tmp_path).versions() == [3]


def test_digests_see_one_bit_dtype_and_shape() -> None:
    tensor = torch.zeros(8)
    flipped = tensor.clone()
    flipped.view(torch.int32)[3] = 1
    kinds = [tensor, flipped, -tensor, tensor.reshape(2, 4), tensor.view(torch.int32)]
    assert len({digests_of({"x": kind})["x"] for kind in kinds}) == len(kinds)


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]),
       st.lists(st.integers(0, 4), max_size=3))  # fmt: skip
def test_a_file_has_the_digests_of_its_tensors(dtype: torch.dtype, shape: list[int]) -> None:
    tensors = {"x": torch.arange(math.prod(shape)).reshape(shape).to(dtype), "y": torch.ones(3)}
    assert file_digests(save(tensors, metadata={"format": "pt"})) == digests_of(tensors)


def test_publishing_again_is_fine_with_the_same_bits_only(tmp_path: Path) -> None:
    store = weights(tmp_path)
    first = store.publish(1, TENSORS, trainer_epoch=0)
    assert store.publish(1, TENSORS, trainer_epoch=1) == first
    other = {**TENSORS, "a": TENSORS["a"] + 1}
    with pytest.raises(WeightsError, match="another trainer is at work"):
        store.publish(1, other, trainer_epoch=1)


def test_nan_is_never_published(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="version 1 is not published: NaN or infinity in a"):
        weights(tmp_path).publish(1, {"a": torch.tensor([float("nan")])}, trainer_epoch=0)
    assert weights(tmp_path).versions() == []


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    store = weights(tmp_path)
    manifest = store.publish(1, TENSORS, trainer_epoch=0)
    file = tmp_path / manifest.file
    whole = file.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        try:
            _, tensors = store.fetch(1)
        except WeightsError as error:
            assert manifest.file in str(error)
        else:  # a byte that no tensor depends on, such as a space in the header
            assert digests_of(tensors) == manifest.digests
    file.write_bytes(whole[:-1])
    with pytest.raises(WeightsError):
        store.fetch(1)


def test_other_roots_runs_and_missing_versions_are_named(tmp_path: Path) -> None:
    store = weights(tmp_path)
    store.publish(1, TENSORS, trainer_epoch=0)
    with pytest.raises(WeightsError, match="ffff was announced"):
        store.fetch(1, root="ffff")
    with pytest.raises(Missing, match=r"v000002/manifest\.json is not there"):
        store.fetch(2)
    other = tmp_path / "runs/r-2/weights/v000001"
    other.mkdir(parents=True)
    (other / "manifest.json").write_bytes((tmp_path / store.manifest_key(1)).read_bytes())
    with pytest.raises(WeightsError, match="is of run r-1"):
        weights(tmp_path, "r-2").fetch(1)


def test_collect_keeps_the_newest(tmp_path: Path) -> None:
    store = weights(tmp_path)
    for version in range(6):
        store.publish(version, {"a": torch.full((2,), float(version))}, trainer_epoch=0)
    left = tmp_path / "runs/r-1/weights/v000001/000000000000.safetensors"
    left.write_bytes(b"of a collection that was killed, or of another trainer")
    store.collect(4)
    assert store.versions() == [2, 3, 4, 5]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4

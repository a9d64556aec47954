"""Which patches a generator makes when versions come faster or slower than its engine takes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.stores.opening import open_store
from infra.weights.bits import Bits
from infra.weights.copy import Copy
from infra.weights.digest import model_digests, tensor_digest
from infra.weights.folder import ModelFolder
from infra.weights.slices import slice_name
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from producers.installing import Newest, VerifiedWeights
from schemas.rank_layout import RankLayout
from tests.factories import make_spec, make_tiny_model


class Source:
    """A trainer's versions, and what a generator has fetched of them."""

    def __init__(self, folder: Path) -> None:
        self.weights = WeightStore(open_store(f"file://{folder}"), "r-1")
        self.newest = Newest(make_spec().model, ModelFolder(folder / "none"))
        self.copy: Copy | None = None
        self._draw = np.random.default_rng(0)
        self._tensor = torch.zeros(200, 10)

    def version(self, number: int) -> VerifiedWeights:
        """The next one; one in a hundred weights moves, some of them back to what they were."""
        pick = self._draw.random(self._tensor.shape) < 0.01
        self._tensor = torch.where(torch.from_numpy(pick), (self._tensor + 1) % 2, self._tensor)
        self.weights.publish(number, {"w": self._tensor, "still": torch.ones(3)}, trainer_epoch=0)
        manifest, self.copy = self.weights.update(self.copy, number)
        return self.newest.version(manifest, self.copy)


@settings(max_examples=25, deadline=None)
@given(claims=st.lists(st.booleans(), min_size=1, max_size=8))
def test_each_patch_is_of_what_the_engine_holds(
    tmp_path_factory: pytest.TempPathFactory, claims: list[bool]
) -> None:
    source = Source(tmp_path_factory.mktemp("store"))
    engine: dict[str, Bits] = {}
    root: str | None = None
    last: VerifiedWeights | None = None
    for number, claim in enumerate(claims):
        fresh = source.version(number)
        assert last is None or not last.claim(), "one that is not claimed is void when a newer one is there"
        patch = fresh.patch.read()
        assert patch.since == root
        assert root is None or set(patch.parts) <= {"w"}
        if claim:
            assert fresh.claim() and not fresh.claim()
            patch.apply(engine)
            root = fresh.root
            assert model_digests(engine) == fresh.digests
        last = fresh


def test_a_version_that_can_t_be_fetched_changes_nothing(tmp_path: Path) -> None:
    source = Source(tmp_path)
    engine: dict[str, Bits] = {}
    first = source.version(0)
    assert first.claim()
    first.patch.read().apply(engine)
    source._tensor = source._tensor + 1
    manifest = source.weights.publish(1, {"w": source._tensor, "still": torch.ones(3)}, trainer_epoch=0)
    chunk = source.weights.chunk_key(manifest.paths[0].chunks[0])
    data = bytearray((tmp_path / chunk).read_bytes())
    whole = bytes(data)
    data[-1] ^= 1
    (tmp_path / chunk).write_bytes(data)
    with pytest.raises(WeightsError, match="is damaged"):
        source.weights.update(source.copy, 1)
    (tmp_path / chunk).write_bytes(whole)
    found, source.copy = source.weights.update(source.copy, 1)
    fresh = source.newest.version(found, source.copy)
    assert fresh.patch.read().since == first.root
    fresh.patch.read().apply(engine)
    assert model_digests(engine) == fresh.digests


def test_a_new_generator_begins_with_all_there_is(tmp_path: Path) -> None:
    """Whatever the one before it died at: its engine is new too."""
    source = Source(tmp_path)
    assert source.version(0).claim()
    source.version(1)
    newest = Newest(make_spec().model, ModelFolder(tmp_path / "none"))
    patch = newest.version(*source.weights.update(None, 1)).patch.read()
    engine: dict[str, Bits] = {}
    patch.apply(engine)
    assert patch.since is None and model_digests(engine) == model_digests(source.copy.model)


def test_an_engine_of_several_ranks_is_asked_for_slices(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    tensors = {name: ModelFolder(model).tensor(name) for name in ModelFolder(model).shapes}
    weights = WeightStore(open_store(f"file://{tmp_path}/store"), "r-1")
    weights.publish(0, tensors, trainer_epoch=0)
    manifest, copy = weights.update(None, 0)
    fresh = Newest(make_spec().model, ModelFolder(model), RankLayout(2)).version(manifest, copy)
    assert set(fresh.digests) == {slice_name(name, rank) for name in tensors for rank in (0, 1)}
    column = "model.layers.0.mlp.down_proj.weight"
    assert fresh.digests[slice_name(column, 1)] == tensor_digest(tensors[column][:, 32:])
    assert fresh.digests[slice_name("model.norm.weight", 1)] == manifest.digests["model.norm.weight"]

"""Checkpoints are committed by a manifest written last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from consumers.checkpoint import Checkpoints, next_trainer_epoch
from infra.store import FileStore, StoreError, open_store

STATE = {"weights.a": torch.arange(3.0), "rng": torch.arange(5, dtype=torch.uint8)}


def save(checkpoints: Checkpoints, iteration: int, **fields: Any) -> None:
    values = {
        "keep": 2, "iteration": iteration, "step": iteration, "root": "r", "positions": {0: 5, 1: 7},
        "ledger": iteration, "recipe": "x", "trainer_epoch": 0,
    } | fields  # fmt: skip
    checkpoints.save(STATE, **values)


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_store(f"file://{tmp_path}"), "r-1")
    assert checkpoints.latest() is None
    for iteration in (2, 10, 4):
        save(checkpoints, iteration)
    found = checkpoints.latest()
    assert found is not None
    manifest, state = found
    assert (manifest.iteration, manifest.positions) == (10, {0: 5, 1: 7})
    assert torch.equal(state["weights.a"], STATE["weights.a"])
    assert len(list(tmp_path.rglob("state.safetensors"))) == 2


def test_without_its_manifest_a_checkpoint_is_not_there(tmp_path: Path) -> None:
    class DiesBeforeTheManifest(FileStore):
        def put_new(self, key: str, data: bytes) -> None:
            raise StoreError("killed here")

    save(Checkpoints(open_store(f"file://{tmp_path}"), "r-1"), 1)
    with pytest.raises(StoreError):
        save(Checkpoints(DiesBeforeTheManifest(f"file://{tmp_path}"), "r-1"), 2)
    found = Checkpoints(open_store(f"file://{tmp_path}"), "r-1").latest()
    assert found is not None
    assert found[0].iteration == 1


def test_damage_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_store(f"file://{tmp_path}"), "r-1")
    save(checkpoints, 1)
    file = next(tmp_path.rglob("state.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(StoreError, match=r"state\.safetensors has other bits than its manifest says"):
        checkpoints.latest()


def test_every_start_of_a_trainer_has_its_number(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    assert [next_trainer_epoch(store, "r-1") for _ in range(3)] == [0, 1, 2]

"""Checkpoints are committed by a manifest written last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from consumers.learners.snapshot import StateSnapshot
from consumers.steps.checkpoint import Checkpoints, RunPosition
from infra.stores.file_store import FileStore
from infra.stores.opening import open_store
from infra.stores.store import StoreError

warn = print
STATE = {"weights.a": torch.arange(3.0), "rng": torch.arange(5, dtype=torch.uint8)}


def save(checkpoints: Checkpoints, iteration: int, **fields: Any) -> None:
    values = {
        "iteration": iteration, "step": iteration, "root": "r", "positions": {0: 5, 1: 7},
        "ledger": iteration, "trainer_epoch": 0,
    } | fields  # fmt: skip
    state, keep = values.pop("state", STATE), values.pop("keep", 2)
    checkpoints.save(state, RunPosition(**values), keep=keep)


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_store(f"file://{tmp_path}"), "r-1")
    assert checkpoints.latest(warn) is None
    for iteration in (2, 10, 4):
        save(checkpoints, iteration)
    found = checkpoints.latest(warn)
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
    found = Checkpoints(open_store(f"file://{tmp_path}"), "r-1").latest(warn)
    assert found is not None
    assert found[0].iteration == 1


def test_what_a_dead_trainer_left_is_removed(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    checkpoints = Checkpoints(store, "r-1")
    store.put("runs/r-1/checkpoints/i000003-e00/state.safetensors", b"died before its manifest")
    store.put("runs/r-1/checkpoints/i000009-e02/state.safetensors", b"of a trainer that began after this one")
    for iteration in (4, 5, 6):
        save(checkpoints, iteration, trainer_epoch=1)
    left = {key.split("/")[3] for key in store.list("runs/r-1/checkpoints")}
    assert left == {"i000005-e01", "i000006-e01", "i000009-e02"}


def test_a_state_that_is_being_written_stays(tmp_path: Path) -> None:
    """The next checkpoint's is written while the one before is committed."""
    checkpoints = Checkpoints(store := open_store(f"file://{tmp_path}"), "r-1")
    written = checkpoints.begin(StateSnapshot({}, STATE), checkpoints.place(9, 0))
    written.result(60)
    for iteration in (6, 7, 8):
        save(checkpoints, iteration, keep=1)
    save(checkpoints, 9, state=written, keep=1)
    found = checkpoints.latest(warn)
    assert found is not None
    assert found[0].iteration == 9
    assert len(store.list("runs/r-1/checkpoints")) == 2


def test_the_newest_from_which_a_step_can_be_reached(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_store(f"file://{tmp_path}"), "r-1")
    for iteration in (2, 1_000_000):
        save(checkpoints, iteration, step=2 * iteration)
    found = [checkpoints.before(step, warn) for step in (3, 4, 1_999_999, 2_000_000)]
    assert [one and one[0].iteration for one in found] == [None, 2, 2, 1_000_000]
    newest = checkpoints.latest(warn)
    assert newest is not None
    assert newest[0].iteration == 1_000_000


def test_damage_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_store(f"file://{tmp_path}"), "r-1")
    save(checkpoints, 1)
    file = next(tmp_path.rglob("state.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(StoreError, match=r"state\.safetensors has other bits than its manifest says"):
        checkpoints.latest(warn)


def test_an_older_one_stands_in_for_a_damaged_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_store(f"file://{tmp_path}"), "r-1")
    for iteration in (1, 2):
        save(checkpoints, iteration)
    (tmp_path / "runs/r-1/checkpoints/i000002-e00/state.safetensors").write_bytes(b"half")
    told: list[str] = []
    found = checkpoints.latest(told.append)
    assert found is not None
    assert found[0].iteration == 1
    assert "i000002-e00/state.safetensors has other bits" in told[0]


def test_the_newest_stays_beside_one_that_claims_to_be_newer(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    checkpoints = Checkpoints(store, "r-1")
    store.put("runs/r-1/checkpoints/i000900-e09/manifest.json", b"a stranger's")
    for iteration in (4, 5, 6):
        save(checkpoints, iteration, keep=1)
        found = checkpoints.latest(warn)
        assert found is not None
        assert found[0].iteration == iteration
    left = {key.split("/")[3] for key in store.list("runs/r-1/checkpoints")}
    assert left == {"i000006-e00", "i000900-e09"}

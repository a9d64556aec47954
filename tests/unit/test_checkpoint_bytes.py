"""Checkpoints of foreign or damaged bytes, and of writers without a key: an older one stands in."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from safetensors.torch import save as save_safetensors

from consumers.learners import snapshot
from consumers.steps import checkpoint_manifest as manifests
from consumers.steps import checkpoint_state
from consumers.steps.checkpoint import Checkpoints, Damaged, RunPosition
from consumers.steps.checkpoint_manifest import CheckpointManifest
from infra.keys import KeyRing
from infra.sealed import canonical_json, json_digest
from infra.stores.file_store import FileStore
from infra.weights.manifest import Tensor

STATE = {
    "weights.a": torch.arange(1000.0), "optimizer.exp_avg.a": torch.arange(1000.0) / 7,
    "rng": torch.arange(50, dtype=torch.uint8), "steps": torch.tensor(3),
}  # fmt: skip
FOLDER = "runs/r-1/checkpoints"


class World:
    """A store with checkpoints of iterations 1 and 2."""

    def __init__(self, folder: Path, keys: KeyRing | None = None) -> None:
        self.folder, self.told = folder, list[str]()
        self.store = FileStore(f"file://{folder}")
        self.own = keys or KeyRing()
        for iteration in (1, 2):
            self.save(iteration, self.own)

    def save(self, iteration: int, keys: KeyRing) -> None:
        Checkpoints(self.store, "r-1", keys).save(
            STATE,
            RunPosition(
                iteration=iteration, step=2 * iteration, root="r", positions={0: 5, 1: 7}, ledger=iteration,
                trainer_epoch=0,
            ),
            keep=9,
        )  # fmt: skip

    def file(self, iteration: int, name: str = "manifest.json") -> Path:
        return self.folder / FOLDER / f"i{iteration:06d}-e00" / name

    def newest(self, keys: KeyRing | None = None) -> int | None:
        """The iteration that a trainer goes on from; whichever way it reads, it is the same."""
        checkpoints, restored = Checkpoints(self.store, "r-1", keys or self.own), dict[str, torch.Tensor]()
        self.told.clear()
        found = checkpoints.latest(self.told.append)
        said = list(self.told)
        self.told.clear()
        manifest = checkpoints.restored(lambda state: restored.update(state), self.told.append)
        assert self.told == said
        assert (found and found[0]) == manifest
        if found is not None:
            assert all(torch.equal(found[1][name], restored[name]) for name in STATE)
            assert all(torch.equal(STATE[name], restored[name]) for name in STATE)
        return found and found[0].iteration


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


def ring(folder: Path, name: str, *, trusted: bool = True) -> KeyRing:
    private, public = folder / name, folder / f"{name}.pub"
    if not private.exists():
        key, pem = ed25519.Ed25519PrivateKey.generate(), serialization.Encoding.PEM
        private.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        public.write_bytes(
            key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
    return KeyRing(str(private), [str(public)] if trusted else [])


def mutations(raw: bytes, count: int) -> list[bytes]:
    """Bytes changed, put in and left out; and values changed in JSON that stays well-formed."""
    draw, found = random.Random(0), []
    for _ in range(count):
        at, byte = draw.randrange(len(raw)), bytes([draw.randrange(256)])
        found.append(
            draw.choice(
                [raw[:at] + byte + raw[at + 1 :], raw[:at] + byte + raw[at:], raw[:at] + raw[at + 1 :]]
            )
        )
    said = json.loads(raw)
    for name, value in said.items():
        for other in (None, 0, 1, -1, 39, 1.5, "", "x", [], {}, {"0": 1}, True, value):
            if other is not value and other != value:
                found.append(json.dumps(said | {name: other}, sort_keys=True, separators=(",", ":")).encode())
        found.append(json.dumps({k: v for k, v in said.items() if k != name}).encode())
    found += [json.dumps(said).encode(), raw + b" ", b"", b"[" * 100_000, b"{}", b"null", b"9" * 5000]
    return [one for one in found if one != raw]


def test_every_mutation_of_a_manifest_is_damage(world: World) -> None:
    raw = world.file(2).read_bytes()
    kept = json.loads(raw)
    assert len(kept) > 10
    found = mutations(raw, 1300)
    for one in found:
        with pytest.raises(Damaged):
            manifests.read_checkpoint_manifest(one, "it", KeyRing())
    for one in found[::200]:
        world.file(2).write_bytes(one)
        assert world.newest() == 1
        assert "an older checkpoint stands in" in world.told[0]


def test_unknown_fields_come_and_go(world: World) -> None:
    """What an older writer did not say is no damage."""
    said = json.loads(world.file(2).read_bytes())
    for name in ("digest", "letters", "roots"):
        said.pop(name, None)
    said["digest"] = blake3(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    world.file(2).write_bytes(json.dumps(said, sort_keys=True, separators=(",", ":")).encode())
    assert world.newest() == 2


def test_a_state_that_is_gone_or_cut_or_changed(world: World) -> None:
    state = world.file(2, "state.safetensors")
    whole = state.read_bytes()
    for other in (whole[:-1], whole + b"0", whole[:-9] + b"?" + whole[-8:], b"?" + whole[1:], b""):
        state.write_bytes(other)
        assert world.newest() == 1
        assert "state.safetensors has other bits than its manifest says" in world.told[0]
    state.unlink()
    assert world.newest() == 1
    assert "state.safetensors is not there, though its manifest is" in world.told[0]
    world.file(1, "state.safetensors").unlink()
    with pytest.raises(Damaged, match=r"no checkpoint can be read: .*i000002.*; .*i000001"):
        world.newest()


def test_another_checkpoint_than_its_folder_says(world: World) -> None:
    shutil.copytree(world.file(1).parent, world.file(40).parent)
    assert world.newest() == 2
    assert "says that it is of run r-1, iteration 1, start 0" in world.told[0]
    other = Checkpoints(world.store, "r-2", world.own)
    shutil.copytree(world.folder / "runs/r-1", world.folder / "runs/r-2")
    with pytest.raises(Damaged, match="says that it is of run r-1"):
        other.latest(print)


def test_what_is_no_checkpoint_is_left_alone(world: World) -> None:
    for key in (
        "notes/manifest.json",
        "i000009/manifest.json",
        "manifest.json",
        "i1-e0/x",
        "i000003-e00/deep/manifest.json",
    ):
        world.store.put(f"{FOLDER}/{key}", b"mine")
    assert world.newest() == 2
    assert len(world.told) == 5
    assert "is in no folder of a checkpoint: it is left alone" in world.told[0]
    world.save(3, world.own)
    Checkpoints(world.store, "r-1", world.own)._collect(1, 3, 9)
    left = set(world.store.list(FOLDER))
    assert {f"{FOLDER}/notes/manifest.json", f"{FOLDER}/i000009/manifest.json"} < left
    assert world.newest() == 3


def test_only_strays_are_no_checkpoint(tmp_path: Path) -> None:
    store = FileStore(f"file://{tmp_path}")
    store.put(f"{FOLDER}/notes/manifest.json", b"mine")
    assert Checkpoints(store, "r-1").latest(print) is None


def planted(world: World, keys: KeyRing, **fields: Any) -> None:
    """A checkpoint of somebody who can write to the store, with all digests right."""
    key = f"{FOLDER}/i000099-e00/state.safetensors"
    tensors = checkpoint_state.write(world.store, key, snapshot.StateSnapshot({}, STATE))
    values = {
        "format": 2, "run": "r-1", "iteration": 99, "step": 99, "root": "r", "positions": {}, "ledger": 0,
        "trainer_epoch": 0, "state": key, "tensors": tensors, "created_at": 0.0, **fields,
    }  # fmt: skip
    world.file(99).write_bytes(manifests.written(CheckpointManifest(**values), keys))


def test_with_keys_only_what_is_signed_is_loaded(tmp_path: Path) -> None:
    own, world = ring(tmp_path, "own"), World(tmp_path / "store", ring(tmp_path, "own"))
    assert world.newest() == 2
    for keys, why in (
        (KeyRing(), "is not signed"),
        (ring(tmp_path, "other"), "is signed by none of the keys"),
    ):
        planted(world, keys)
        assert world.newest(ring(tmp_path, "other") if why == "" else own) == 2
        assert why in world.told[0]
    assert world.newest(ring(tmp_path, "other")) == 99
    planted(world, own)
    assert world.newest() == 99
    said = json.loads(world.file(99).read_bytes())
    said["step"] = 7
    del said["digest"]
    said["digest"] = json_digest(said)
    world.file(99).write_bytes(canonical_json(said))
    assert world.newest() == 2, "the signature is of another step"
    assert world.newest(KeyRing()) == 99, "without keys all is believed"


def test_a_signature_is_of_a_checkpoint(tmp_path: Path) -> None:
    """What was signed as something else is not taken for one."""
    own = ring(tmp_path, "own")
    world = World(tmp_path / "store", own)
    said = json.loads(world.file(2).read_bytes())
    del said["digest"], said["signature"]
    said["signature"] = own.sign(canonical_json(said), "run")
    said["digest"] = json_digest(said)
    world.file(2).write_bytes(canonical_json(said))
    assert world.newest() == 1


def first_format(world: World, iteration: int) -> None:
    data, folder = save_safetensors(STATE), f"{FOLDER}/i{iteration:06d}-e00"
    world.store.put(f"{folder}/state.safetensors", data)
    said = {
        "format": 1, "run": "r-1", "iteration": iteration, "step": 5, "root": "r", "positions": {"0": 5},
        "ledger": 3, "trainer_epoch": 0, "state": f"{folder}/state.safetensors",
        "digest": blake3(data).hexdigest(), "created_at": 1.0,
    }  # fmt: skip
    world.store.put(f"{folder}/manifest.json", json.dumps(said).encode())


def test_the_first_format_is_read_where_nothing_is_signed(tmp_path: Path) -> None:
    world = World(tmp_path / "store", ring(tmp_path, "own"))
    first_format(world, 5)
    assert world.newest(KeyRing()) == 5
    assert world.newest() == 2
    assert "is not signed" in world.told[0]
    world.file(5, "state.safetensors").write_bytes(b"half")
    assert world.newest(KeyRing()) == 2
    world.file(5, "state.safetensors").unlink()
    assert world.newest(KeyRing()) == 2


def test_sizes_are_bounded_before_memory_is_taken(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = Tensor(dtype="F32", shape=(1 << 30, 1 << 10), digest="0")
    planted(world, KeyRing(), tensors={"weights.a": huge})
    real = torch.empty
    with monkeypatch.context() as patch:
        bounded = lambda shape, **given: real(shape, **given) if sum(shape) < 1e6 else pytest.fail("taken")  # noqa: E731
        patch.setattr(torch, "empty", bounded)
        assert world.newest() == 2
    assert "bytes instead of 4398046511" in world.told[0]
    monkeypatch.setattr(manifests, "LARGEST_MANIFEST", 100)
    with pytest.raises(Damaged, match="no checkpoint's manifest is as large"):
        world.newest()


class Counting(FileStore):
    read, largest = 0, 0

    def get_part(self, key: str, at: int, size: int) -> bytes:
        self.read, self.largest = self.read + size, max(self.largest, size)
        return super().get_part(key, at, size)

    def get(self, key: str, size: int | None = None) -> bytes:
        assert not key.endswith(".safetensors"), "as a whole"
        return super().get(key, size)


def test_it_is_read_once_and_in_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_state, "PIECE", 512)
    store = Counting(world.store.url)
    state = dict[str, torch.Tensor]()
    assert Checkpoints(store, "r-1").restored(lambda found: state.update(found), print)
    size = world.file(2, "state.safetensors").stat().st_size
    assert size <= store.read <= size + 512
    assert store.largest <= 512


def test_what_breaks_off_while_it_is_restored_is_restored_over(world: World) -> None:
    """The learner has some tensors of the damaged one by then."""
    state = world.file(2, "state.safetensors")
    raw = bytearray(state.read_bytes())
    raw[-1] ^= 1
    state.write_bytes(raw)
    got: list[dict[str, torch.Tensor]] = []

    def restore(found: Mapping[str, torch.Tensor]) -> None:
        got.append({})
        for name in found:
            got[-1][name] = found[name]

    manifest = Checkpoints(world.store, "r-1").restored(restore, world.told.append)
    assert manifest is not None and manifest.iteration == 1
    assert [len(one) for one in got] == [len(STATE) - 1, len(STATE)] or len(got[0]) < len(STATE) == len(
        got[1]
    )

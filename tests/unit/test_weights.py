"""Weights versions: whole and verified, or not at all."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from infra.stores.file_store import FileStore
from infra.stores.opening import open_store
from infra.stores.store import Missing, StoreError
from infra.weights import leases, notes, versions
from infra.weights.bits import file_model, kind_of
from infra.weights.cheapest_paths import cheapest
from infra.weights.codec import scan as codec_scan
from infra.weights.digest import digests_of, model_digests, root_digest
from infra.weights.leases import Lease, leased
from infra.weights.manifest import Chunk, VersionManifest
from infra.weights.manifest import Path as ChunkPath
from infra.weights.signing import Keys
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from tests.waiting import wait_until

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
    file = file_model(save(tensors, metadata={"format": "pt"}))
    assert model_digests(file) == digests_of(tensors)


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


def changed(tensors: dict[str, torch.Tensor], seed: int, part: float = 0.004) -> dict[str, torch.Tensor]:
    """bf16 tensors of which some elements have moved by a place."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.view(torch.int16) + (torch.rand(tensor.shape, generator=draw) < part).short()).view(
            tensor.dtype
        )
        for name, tensor in tensors.items()
    }


def series(count: int, part: float = 0.004) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    found = [{name: torch.randn(9000, generator=draw).bfloat16() for name in ("x", "y")}]
    for seed in range(count - 1):
        found.append(changed(found[-1], seed, part))
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return digests_of(one) == digests_of(other)


def test_versions_are_deltas_skips_and_keyframes(tmp_path: Path) -> None:
    store, models = weights(tmp_path), series(42)
    manifests = [store.publish(version, model, trainer_epoch=0) for version, model in enumerate(models)]
    since = [[path.since for path in manifest.paths] for manifest in manifests]
    assert since[:3] == [[None], [0], [1]]
    assert since[8] == [7, 0] and since[16] == [15, 8] and since[40] == [39, 32]
    assert since[32] == [31, None, 24, 0]
    delta, keyframe = manifests[1].paths[0].size, manifests[0].paths[0].size
    assert delta < 0.05 * keyframe < 0.05 * manifests[0].size
    assert manifests[8].path(0).size < sum(one.path(one.version - 1).size for one in manifests[1:9])  # type: ignore[union-attr]
    for before, manifest in itertools.pairwise(manifests):
        assert manifest.previous == before.hash()
    for version in (0, 1, 7, 15, 31, 41):
        assert same(weights(tmp_path).fetch(version)[1], models[version]), version


def test_a_follower_fetches_what_changed(tmp_path: Path) -> None:
    store, models = weights(tmp_path), series(20)
    copy, fetched = None, []
    for version, model in enumerate(models):
        store.publish(version, model, trainer_epoch=0)
        if version not in (3, 4, 5):
            _, copy = weights(tmp_path).update(
                copy, version, progress=lambda done, whole: fetched.append(whole)
            )
            assert same(copy.tensors(), model), version
    sizes = [store.manifest(version).paths[0].size for version in range(20)]
    assert fetched[1] == sizes[1]
    assert sum(sizes[3:7]) in fetched, "what it has missed, one after the other"


def test_what_applies_changes_is_loaded_while_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, kinds = weights(tmp_path), []
    for version, model in enumerate(series(2)):
        store.publish(version, model, trainer_epoch=0)
    monkeypatch.setattr(versions, "load_scanner", kinds.append)
    weights(tmp_path).fetch(0)
    assert not kinds
    weights(tmp_path).fetch(1)
    assert kinds == [kind_of("BF16")]


def test_loading_it_changes_nothing_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def apply(*given: Any) -> Iterator[bool]:
        found.extend(plain.apply(*given))
        raise RuntimeError

    plain = codec_scan.scanner("plain")
    monkeypatch.setattr(codec_scan, "scanner", lambda: replace(plain, apply=apply))
    codec_scan._apply_nothing(kind_of("BF16"))
    assert found == [False]


def test_a_copy_that_is_not_what_it_says_is_made_anew(tmp_path: Path) -> None:
    store, models = weights(tmp_path), series(3)
    for version, model in enumerate(models):
        store.publish(version, model, trainer_epoch=0)
    _, copy = store.update(None, 1)
    copy.model["x"].data[17] ^= 4
    _, again = store.update(copy, 2)
    assert same(again.tensors(), models[2])
    store.update(again, 2)
    assert again.version == 2, "nothing to do"


def test_where_nearly_all_changes_there_are_only_keyframes(tmp_path: Path) -> None:
    store = weights(tmp_path)
    for version in range(12):
        model = {"x": torch.randn(5000, generator=torch.Generator().manual_seed(version))}
        manifest = store.publish(version, model, trainer_epoch=0)
        assert [path.since for path in manifest.paths] == [None]
        assert same(store.fetch(version)[1], model)


def test_a_publisher_that_begins_again_goes_on_with_deltas(tmp_path: Path) -> None:
    models = series(4)
    store = weights(tmp_path)
    for version in (0, 1):
        store.publish(version, models[version], trainer_epoch=0)
    resumed = weights(tmp_path)
    resumed.publish(1, models[1], trainer_epoch=1)
    assert [path.since for path in resumed.publish(2, models[2], trainer_epoch=1).paths] == [1]
    assert [path.since for path in weights(tmp_path).publish(3, models[3], trainer_epoch=2).paths] == [None]
    assert same(weights(tmp_path).fetch(3)[1], models[3])


def test_two_that_publish_one_version_cannot_both(tmp_path: Path) -> None:
    """Each has put its chunks when the other one's manifest comes first."""
    one, other = series(1)[0], changed(series(1)[0], 9)

    class Late(FileStore):
        def put_new(self, key: str, data: bytes) -> None:
            if key.endswith("manifest.json"):
                weights(tmp_path).publish(0, one, trainer_epoch=0)
            super().put_new(key, data)

    late = WeightStore(Late(f"file://{tmp_path}"), "r-1")
    with pytest.raises(WeightsError, match="another trainer is at work on this run"):
        late.publish(0, other, trainer_epoch=1)
    assert same(weights(tmp_path).fetch(0)[1], one)


def chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/r-1/weights/chunks/*"))


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    store = weights(tmp_path)
    store.publish(1, TENSORS, trainer_epoch=0)
    (file,) = chunk_files(tmp_path)
    whole = file.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(WeightsError, match=f"{file.name} is damaged"):
            store.fetch(1)
    file.write_bytes(whole[:-1])
    with pytest.raises(WeightsError, match=f"{file.name} is damaged"):
        store.fetch(1)
    file.unlink()
    with pytest.raises(Missing, match=f"{file.name} is not there"):
        store.fetch(1)


def test_a_damaged_manifest_is_none(tmp_path: Path) -> None:
    store = weights(tmp_path)
    store.publish(1, TENSORS, trainer_epoch=0)
    file = tmp_path / store.manifest_key(1)
    whole = json.loads(file.read_text())
    for change, said in (
        ({"format": 1}, "has format 1; this version of StreamRL reads format 2"),
        ({"paths": []}, "is not a weights manifest: .*paths"),
        ({"extra": 1}, "is not a weights manifest: .*extra"),
        ({"tensors": {"a": {"dtype": "F12", "shape": [1], "digest": ""}}}, "a has an unknown type, F12"),
    ):
        file.write_text(json.dumps(whole | change))
        with pytest.raises(WeightsError, match=rf"(?s)manifest\.json:? {said}"):
            store.fetch(1)
    other = whole["tensors"] | {"a": whole["tensors"]["a"] | {"digest": "00"}}
    file.write_text(json.dumps(whole | {"tensors": other}))
    with pytest.raises(WeightsError, match="its root is not that of its tensors"):
        store.fetch(1)
    root = root_digest({name: tensor["digest"] for name, tensor in other.items()})
    file.write_text(json.dumps(whole | {"tensors": other, "root": root}))
    with pytest.raises(WeightsError, match="its chunks make wrong bits of a"):
        store.fetch(1)


@pytest.fixture
def key_files(tmp_path: Path) -> dict[str, Path]:
    found = {}
    for name in ("own", "other"):
        private = ed25519.Ed25519PrivateKey.generate()
        found[name], found[f"{name}.pub"] = tmp_path / name, tmp_path / f"{name}.pub"
        pem = serialization.Encoding.PEM
        found[name].write_bytes(
            private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        found[f"{name}.pub"].write_bytes(
            private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
    return found


def test_what_is_not_signed_by_somebody_trusted_is_refused(
    tmp_path: Path, key_files: dict[str, Path]
) -> None:
    url = f"file://{tmp_path}/store"

    def store(signing: str | None = None, *trusted: str) -> WeightStore:
        own = str(key_files[signing]) if signing else None
        return WeightStore(open_store(url), "r-1", keys=Keys(own, [str(key_files[name]) for name in trusted]))

    store("own").publish(0, TENSORS, trainer_epoch=0)
    store().publish(1, TENSORS, trainer_epoch=0)
    assert store(None, "other.pub", "own.pub").fetch(0)
    assert store().fetch(1)
    with pytest.raises(WeightsError, match="is signed by none of the keys in STREAMRL_TRUSTED_KEYS"):
        store(None, "other.pub").fetch(0)
    with pytest.raises(WeightsError, match="is not signed; STREAMRL_TRUSTED_KEYS asks for signatures"):
        store(None, "own.pub").fetch(1)
    file = tmp_path / "store" / store().manifest_key(0)
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"trainer_epoch": 7}))
    with pytest.raises(WeightsError, match="is signed by none"):
        store(None, "own.pub").fetch(0)


def test_keys_are_read_from_the_environment(
    key_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STREAMRL_SIGNING_KEY", str(key_files["own"]))
    monkeypatch.setenv("STREAMRL_TRUSTED_KEYS", f"{key_files['other.pub']}:{key_files['own.pub']}")
    assert weights(tmp_path / "store").publish(0, TENSORS, trainer_epoch=0).signature
    assert weights(tmp_path / "store").fetch(0)
    monkeypatch.setenv("STREAMRL_SIGNING_KEY", str(key_files["own.pub"]))
    with pytest.raises(WeightsError, match=r"STREAMRL_SIGNING_KEY: .*own\.pub can't be read as a key"):
        weights(tmp_path)


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


def test_collect_keeps_what_is_needed(tmp_path: Path) -> None:
    store, models = weights(tmp_path), series(42)
    for version, model in enumerate(models):
        store.publish(version, model, trainer_epoch=0)
    store.collect(4, grace_s=0)
    assert store.versions()[0] == 0, "two keyframes are kept"
    for version in range(42, 67):
        models.append(changed(models[-1], version))
        store.publish(version, models[-1], trainer_epoch=0)
    store.collect(4, grace_s=0)
    assert store.versions() == list(range(32, 67))
    assert [version for version in store.versions() if store.manifest(version).path(None)] == [32, 64]
    named = {
        chunk.hash
        for version in store.versions()
        for path in store.manifest(version).paths
        for chunk in path.chunks
    }
    assert {file.name for file in chunk_files(tmp_path)} == named
    assert same(weights(tmp_path).fetch(63)[1], models[63])
    _, copy = weights(tmp_path).update(None, 40)
    assert same(weights(tmp_path).update(copy, 66)[1].tensors(), models[66])


def test_collect_keeps_the_newest_keyframes(tmp_path: Path) -> None:
    store = weights(tmp_path)
    for version in range(6):
        store.publish(version, {"a": torch.full((2,), float(version))}, trainer_epoch=0)
    store.collect(4, grace_s=0)
    assert store.versions() == [2, 3, 4, 5]
    assert len(chunk_files(tmp_path)) == 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What collectors go by, in seconds; it stands still unless a test moves it."""
    at = [notes.now()]
    monkeypatch.setattr(notes, "now", lambda: at[0])
    yield at


def test_what_no_version_names_goes_when_it_has_been_so_for_a_while(
    tmp_path: Path, clock: list[float]
) -> None:
    store = weights(tmp_path)
    store.publish(0, TENSORS, trainer_epoch=0)
    left = chunk_files(tmp_path)[0].with_name("ff")
    left.write_bytes(b"of a publisher that died")
    for _ in range(2):
        store.collect(1, grace_s=60)
    assert left.exists()
    clock[0] += 61
    store.collect(1, grace_s=60)
    assert not left.exists() and len(chunk_files(tmp_path)) == 1


def test_of_what_another_machine_has_noted_nothing_goes(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock may be wrong by hours; and a note that can't be read is none."""
    store = weights(tmp_path)
    store.publish(0, TENSORS, trainer_epoch=0)
    left = chunk_files(tmp_path)[0].with_name("ff")
    left.write_bytes(b"of a publisher that died")
    monkeypatch.setattr(notes, "clock", lambda: "another machine")
    store.collect(1, grace_s=60)
    clock[0] += 3600
    monkeypatch.undo()
    store.collect(1, grace_s=60)
    assert left.exists()
    file = tmp_path / "runs/r-1/weights/garbage.json"
    for raw in ("[" * 100_000, "[]", json.dumps({notes.clock(): {"ff": [1, "x"]}}), "{"):
        file.write_text(raw)
        store.collect(1, grace_s=60)
        assert left.exists()


def test_notes_and_leases_are_read_up_to_their_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, sizes = open_store(f"file://{tmp_path}"), []
    plain = store.get
    monkeypatch.setattr(store, "get", lambda key, size=None: sizes.append(size) or plain(key, size))
    monkeypatch.setattr(notes, "_LARGEST", 100)
    store.put("w/readers.json", b" " * 200 + b"{}")
    store.put("w/leases/x.json", b" " * 5000 + b'{"version": 1, "puts": false}')
    assert leased(store, "w") == ([0], True), "a lease that can't be read keeps everything"
    assert (
        sizes == [100, 4096] and "readers.json has more than 100 bytes, so it is passed over" in caplog.text
    )
    assert len(store.get("w/readers.json")) < 200


def test_what_is_being_read_or_published_stays(tmp_path: Path, clock: list[float]) -> None:
    store = weights(tmp_path)
    for version in range(6):
        store.publish(version, {"a": torch.full((2,), float(version))}, trainer_epoch=0)
    left = chunk_files(tmp_path)[0].with_name("ff")
    left.write_bytes(b"of a version that is about to be published")
    prefix = "runs/r-1/weights"
    with Lease(open_store(f"file://{tmp_path}"), prefix, 1):
        store.collect(1, grace_s=0)
        assert store.versions() == [1, 2, 3, 4, 5]
        left.write_bytes(b"again")
        with Lease(open_store(f"file://{tmp_path}"), prefix, 6, puts=True):
            store.collect(1, grace_s=0)
            assert left.exists()
    dead = tmp_path / prefix / "leases/dead.json"
    dead.write_text(json.dumps({"version": 1, "at": time.time(), "puts": False}))
    store.collect(1, grace_s=0)
    assert dead.exists() and store.versions()[0] == 1
    clock[0] += leases.LEASE_S + 1
    store.collect(1, grace_s=0)
    assert store.versions() == [4, 5]
    assert not left.exists() and not dead.exists()


@pytest.mark.parametrize("wrong_s", [0.0, -3 * 3600.0, 3 * 3600.0])
def test_who_is_far_behind_keeps_its_version_as_long_as_it_lives(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch, wrong_s: float
) -> None:
    """Whatever its clock says, and without a chunk for eleven minutes: its renewals are seen."""
    store, prefix = weights(tmp_path), "runs/r-1/weights"
    for version in range(6):
        store.publish(version, {"a": torch.full((2,), float(version))}, trainer_epoch=0)
    true = time.time
    monkeypatch.setattr(leases.time, "time", lambda: true() + wrong_s)
    with Lease(open_store(f"file://{tmp_path}"), prefix, 1, renew_s=0.01):
        (lease,) = (tmp_path / prefix / "leases").iterdir()
        for _ in range(4):
            before = lease.read_bytes()
            wait_until(lambda said=before: lease.read_bytes() != said, what="a renewal")
            store.collect(1, grace_s=0)
            clock[0] += 660.0
        assert store.versions()[0] == 1
    store.collect(1, grace_s=0)
    assert store.versions() == [4, 5]


def test_a_renewal_that_fails_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Away(FileStore):
        errors: ClassVar[list[Exception]] = []

        def put(self, key: str, data: bytes) -> None:
            if self.errors:
                raise self.errors.pop(0)
            super().put(key, data)

    store = Away(f"file://{tmp_path}")
    with Lease(store, "w", 1, renew_s=0.01):
        (lease,) = (tmp_path / "w/leases").iterdir()
        before = lease.read_bytes()
        store.errors += [StoreError("no space"), ValueError("nobody has foreseen")]
        wait_until(lambda: lease.read_bytes() != before and not store.errors, what="the next renewal")
    assert "can't be renewed: StoreError: no space" in caplog.text
    assert "nobody has foreseen" in caplog.text
    assert not lease.exists()


def test_a_version_that_was_planted_stops_no_collection_and_costs_no_chunk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = weights(tmp_path)
    for version in range(6):
        store.publish(version, {"a": torch.full((2,), float(version))}, trainer_epoch=0)
    planted = tmp_path / store.manifest_key(999)
    planted.parent.mkdir()
    planted.write_text("[" * 1000)
    before = chunk_files(tmp_path)
    store.collect(1, grace_s=0)
    assert store.versions() == [4, 5, 999] and chunk_files(tmp_path) == before
    assert "passed over: " in caplog.text and "v000999" in caplog.text
    planted.unlink()
    store.collect(1, grace_s=0)
    assert len(chunk_files(tmp_path)) < len(before)


def test_a_collection_that_is_killed_anywhere_is_made_up_for(tmp_path: Path) -> None:
    models = series(67)

    class Dies(FileStore):
        left = 0

        def delete(self, key: str) -> None:
            if "leases" not in key:
                if not self.left:
                    raise KeyboardInterrupt
                self.left -= 1
            super().delete(key)

    store = weights(tmp_path)
    for version, model in enumerate(models):
        store.publish(version, model, trainer_epoch=0)
    dying = Dies(f"file://{tmp_path}")
    for deletions in itertools.count(1, 7):
        dying.left = deletions
        try:
            WeightStore(dying, "r-1").collect(4, grace_s=0)
        except KeyboardInterrupt:
            for version in (store.versions()[0], 63, 66):
                if version >= 32:
                    assert same(weights(tmp_path).fetch(version)[1], models[version])
        else:
            break
    assert store.versions()[0] == 32


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 500)), min_size=1, max_size=30), st.integers(0, 9)
)
@settings(deadline=None)
def test_the_way_is_the_cheapest(edges: list[tuple[int, int]], held: int) -> None:
    """Against all ways there are."""
    last = 10
    paths: dict[int, list[ChunkPath]] = {version: [] for version in range(last + 1)}
    for number, (since, size) in enumerate(edges):
        version = since + 1 + number % (last - since)
        start = None if since == 0 else since
        root = None if start is None else f"r{start}"
        chunk = Chunk(hash=f"{number:064x}", size=size << 20)
        paths[version].append(ChunkPath(since=start, root=root, chunks=(chunk,)))
    manifests = {
        version: VersionManifest(run="r", version=version, root=f"r{version}", tensors={}, paths=tuple(some),
                          trainer_epoch=0, created_at=0.0)
        for version, some in paths.items() if some
    }  # fmt: skip

    def least(version: int) -> float:
        if version == held:
            return 0
        options = [
            path.size + (1 << 17) + (0 if path.since is None else least(path.since))
            for path in (manifests[version].paths if version in manifests else ())
        ]
        return min(options, default=math.inf)

    if last not in manifests:
        return
    paths = cheapest(manifests[last], manifests.get, (held, f"r{held}"))
    if paths is None:
        assert least(last) == math.inf
    else:
        assert sum(path.size + (1 << 17) for _, path in paths) == least(last)
        for (before, _), (_, path) in itertools.pairwise(paths):
            assert path.since == before.version
        assert paths[0][1].since in (None, held) and paths[-1][0].version == last

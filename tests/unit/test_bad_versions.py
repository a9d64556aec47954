"""Versions that are damaged, swapped or made up: errors that name them, and never a wrong weight."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.roles.context import RoleContext
from infra.stores.file_store import FileStore
from infra.stores.opening import open_store
from infra.stores.store import Missing, StoreError
from infra.weights.copy import Copy
from infra.weights.signing import Keys
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from producers.weights_watch import WeightsWatch
from schemas.messages import WeightsAnnouncement
from schemas.wire import encode
from tests.damage import cuts_and_flips
from tests.factories import make_context, make_spec
from tests.unit.test_weights import changed, same
from tests.waiting import wait_until

FIRST = {"x": torch.arange(1, 4000).bfloat16(), "y": torch.ones(3)}


def moved(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    return {**tensors, **changed({"x": tensors["x"]}, seed, part=0.003)}


MODELS = [FIRST, moved(FIRST, 1), moved(moved(FIRST, 1), 2)]


class Served:
    """Three versions, told as what changed, and readers that hold the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weights = folder, WeightStore(open_store(f"file://{folder}"), "r-1")
        for version, model in enumerate(MODELS):
            self.weights.publish(version, model, trainer_epoch=0)
        self.first = bytes(self.weights.fetch_file(0)[1])
        self.root = self.weights.manifest(0).root

    def chunk(self, version: int) -> Path:
        """What leads to a version from the one before, or from nothing."""
        (path,) = self.weights.manifest(version).paths
        assert path.since == (version - 1 if version else None)
        return self.folder / self.weights.chunk_key(path.chunks[0])

    def name(self, version: int, data: bytes) -> None:
        """Have a version's manifest name another object, which is there."""
        digest = blake3(data).hexdigest()
        self.chunk(version).with_name(digest).write_bytes(data)
        file = self.folder / self.weights.manifest_key(version)
        said = json.loads(file.read_text())
        said["paths"][0]["chunks"] = [{"hash": digest, "size": len(data)}]
        file.write_text(json.dumps(said))

    def copy(self) -> Copy:
        return Copy(bytearray(self.first), 0, self.root)


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


def refused(served: Served, said: str, version: int = 1) -> None:
    """A reader is told, has nothing that is called a version, and goes on when all is well again."""
    copy = served.copy()
    with pytest.raises(WeightsError, match=said):
        served.weights.update(copy, version)
    assert copy.version is None


def test_every_flipped_bit_and_every_cut_of_a_chunk_is_found(shared: Served) -> None:
    file = shared.chunk(1)
    whole = file.read_bytes()
    for data in cuts_and_flips(whole):
        file.write_bytes(data)
        copy = shared.copy()
        with pytest.raises(WeightsError, match=f"{file.name} is damaged: it has other bytes than its name"):
            shared.weights.update(copy, 1)
        assert copy.version is None
    file.write_bytes(whole)
    assert same(shared.weights.update(copy, 1)[1].tensors(), MODELS[1])


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_chunk_that_is_named_as_it_is_makes_no_wrong_weight(shared: Served, data: st.DataObject) -> None:
    """Damaged before it was named: then its name says nothing, and the hashes of tiles and tensors do."""
    manifest = shared.folder / shared.weights.manifest_key(1)
    kept, whole = manifest.read_bytes(), shared.chunk(1).read_bytes()
    flipped = bytearray(whole)
    for bit in data.draw(st.lists(st.integers(0, 8 * len(whole) - 1), min_size=1, max_size=3, unique=True)):
        flipped[bit // 8] ^= 1 << bit % 8
    shared.name(1, bytes(flipped[: data.draw(st.integers(1, len(whole)))]))
    copy = shared.copy()
    try:
        shared.weights.update(copy, 1)
    except WeightsError:
        assert copy.version is None
    else:
        assert same(copy.tensors(), MODELS[1]), "it was damaged where nothing is said"
    finally:
        manifest.write_bytes(kept)


def test_chunks_of_two_versions_swapped(served: Served) -> None:
    one, other = served.chunk(1), served.chunk(2)
    data = one.read_bytes(), other.read_bytes()
    one.write_bytes(data[1])
    other.write_bytes(data[0])
    refused(served, f"{one.name} is damaged")
    one.write_bytes(data[0])
    other.write_bytes(data[1])
    served.name(1, data[1])
    refused(served, rf"x\[0:3999\] holds other bits than those that .*{other.name} is for")
    served.name(1, served.chunk(0).read_bytes())
    refused(served, r"v000001/manifest\.json: its chunks make wrong bits of x")


def test_a_chunk_of_another_model(served: Served, tmp_path: Path) -> None:
    other = WeightStore(open_store(f"file://{tmp_path}/other"), "r-1")
    other.publish(0, {"z": torch.ones(3)}, trainer_epoch=0)
    (path,) = other.manifest(0).paths
    served.name(1, (tmp_path / "other" / other.chunk_key(path.chunks[0])).read_bytes())
    refused(served, "is for another model: this one has no F32 z")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: m["paths"][0]["chunks"][0].update(hash="../../../../x"),
            r"paths\.0\.chunks\.0\.hash",
        ),
        (lambda m: m["paths"][0]["chunks"][0].update(hash="/etc/passwd"), r"paths\.0\.chunks\.0\.hash"),
        (lambda m: m["paths"][0]["chunks"][0].update(size=-1), r"paths\.0\.chunks\.0\.size"),
        (lambda m: m.update(files={"../x": {"hash": "0" * 64, "size": 1}}), "files"),
        (lambda m: m.update(files={"a/x": {"hash": "0" * 64, "size": 1}}), "files"),
        (lambda m: m.update(files={"..": {"hash": "0" * 64, "size": 1}}), "files"),
        (lambda m: m["tensors"]["x"].update(shape=[-1]), r"tensors\.x\.shape"),
    ],
)
def test_a_manifest_that_names_what_is_outside(
    served: Served, change: Callable[[Any], None], said: str
) -> None:
    file = served.folder / served.weights.manifest_key(1)
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))
    with pytest.raises(WeightsError, match=rf"(?s)v000001/manifest\.json is not a weights man.*{said}"):
        served.weights.update(served.copy(), 1)


def test_a_manifest_of_another_run_or_version(served: Served) -> None:
    file = served.folder / served.weights.manifest_key(1)
    whole = json.loads(file.read_text())
    for change, said in (
        ({"run": "r-2"}, r"v000001/manifest\.json is of run r-2, version 1; r-1, 1 is expected"),
        ({"version": 2}, r"is of run r-1, version 2; r-1, 1 is expected"),
    ):
        file.write_text(json.dumps({**whole, **change}))
        with pytest.raises(WeightsError, match=said):
            served.weights.update(served.copy(), 1)


def test_a_manifest_whose_path_is_from_another_root(served: Served) -> None:
    """A reader never begins with it: it is made from nothing, which is a way here."""
    file = served.folder / served.weights.manifest_key(1)
    said = json.loads(file.read_text())
    said["paths"][0]["root"] = "00"
    file.write_text(json.dumps(said))
    copy = served.copy()
    refusal = (
        r"version 1 of run r-1 can't be made: .* has no keyframe of it, and an older version .* not there"
    )
    with pytest.raises(WeightsError, match=refusal):
        served.weights.update(copy, 1)
    assert (copy.version, copy.root) == (0, served.root)
    assert same(copy.tensors(), MODELS[0])


class Troubled(FileStore):
    """A store in trouble."""

    trouble: StoreError | None = None

    def get(self, key: str, size: int | None = None) -> bytes:
        if self.trouble is not None and "/chunks/" in key:
            raise self.trouble
        return super().get(key, size)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[tuple[RoleContext, Troubled]]:
    found = make_context(make_spec(), tmp_path, role="generator")
    store = Troubled(found.store.url)
    found.store = store
    yield found, store
    found.stop.set()


@pytest.mark.parametrize(
    "trouble",
    [
        StoreError("s3://b/x can't be read: the credentials have expired: renew AWS_SESSION_TOKEN"),
        StoreError("s3://b/x can't be read: the server can't be reached: look at AWS_ENDPOINT_URL"),
        StoreError("s3://b/x can't be read: there is no such bucket"),
        StoreError("s3://b/x can't be read: [Errno 28] No space left on device"),
        Missing("s3://b/x is not there"),
    ],
)
def test_the_last_good_version_stays_in_use(
    context: tuple[RoleContext, Troubled], caplog: pytest.LogCaptureFixture, trouble: StoreError
) -> None:
    caplog.set_level(logging.WARNING)
    run, store = context
    weights = WeightStore(open_store(store.url), run.run)

    def publish(version: int) -> None:
        manifest = weights.publish(version, MODELS[version], trainer_epoch=0)
        said = WeightsAnnouncement(
            run=run.run, version=version, root=manifest.root, manifest="", size=1, trainer_epoch=0,
            announced_at=0.0,
        )  # fmt: skip
        run.writer.send(run.topics.weights, encode(said), key="newest")

    taken: list[int] = []
    tail = WeightsWatch(run, threading.Event()).open()

    def have(version: int) -> Callable[[], bool]:
        def true() -> bool:
            taken.extend(found.version for found in tail.take())
            return taken[-1:] == [version]

        return true

    try:
        publish(0)
        wait_until(have(0), what="the first version")
        store.trouble = trouble
        publish(1)
        wait_until(lambda: str(trouble) in caplog.text, what="the warning")
        assert "weights 1 can't be had" in caplog.text and "weights 0 stay in use" in caplog.text
        assert tail.take() == []
        store.trouble = None
        wait_until(have(1), what="the version, when all is well again")
    finally:
        tail.close()


def test_what_nobody_trusted_has_signed_is_not_taken(served: Served, tmp_path: Path) -> None:
    """The reader keeps what it has: nothing of it was touched."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate().public_key()
    pem = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "key.pub").write_bytes(key.public_bytes(*pem))
    keys = Keys(None, [str(tmp_path / "key.pub")])
    copy = served.copy()
    with pytest.raises(WeightsError, match=r"v000001/manifest\.json is not signed; STREAMRL_TRUSTED_KEYS"):
        WeightStore(open_store(f"file://{served.folder}"), "r-1", keys=keys).update(copy, 1)
    assert (copy.version, bytes(copy.file)) == (0, served.first)

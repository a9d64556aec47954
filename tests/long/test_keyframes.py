"""Ways from nothing that versions are given later: found, believed and collected, killed at any write."""

from __future__ import annotations

import itertools
import json
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from flows.checkpoints.audit import Audit
from flows.cli import app
from infra.roles.heart import Heart
from infra.stores.file_store import FileStore
from infra.stores.opening import open_store
from infra.weights import leases
from infra.weights.leases import Lease
from infra.weights.signing import Keys
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from tests.fakes.crashing import Crash, CrashingStore, Killed, Life, crashes_of
from tests.unit.test_weights import changed, chunk_files, key_files, same, series, weights

__all__ = ["key_files"]
PREFIX = "runs/r-1/weights"


@pytest.fixture(scope="module")
def models() -> list[dict[str, torch.Tensor]]:
    return series(12)


def published(folder: Path, models: list[dict[str, torch.Tensor]], keys: Keys | None = None) -> WeightStore:
    store = WeightStore(open_store(f"file://{folder}"), "r-1", keys=keys)
    for version, model in enumerate(models):
        store.publish(version, model, trainer_epoch=0)
    return store


def whole_size(store: WeightStore, version: int) -> int:
    path = store.complete(store.manifest(version)).path(None)
    assert path is not None
    return path.size


def test_who_joins_late_takes_it(tmp_path: Path, models: list[dict[str, torch.Tensor]]) -> None:
    store = published(tmp_path, models)
    before = store.manifest(10)
    manifest, new = store.add_keyframe(10)
    assert new and manifest.path(None) is not None
    assert store.manifest(10) == before, "what is published never changes"
    assert store.add_keyframe(10) == (manifest, False)
    assert store.add_keyframe(0)[1] is False, "it was published with one"
    fetched: list[int] = []
    found = weights(tmp_path).update(None, 11, progress=lambda done, whole: fetched.append(whole))[1]
    assert same(found.tensors(), models[11])
    delta = store.manifest(11).path(10)
    assert delta is not None and set(fetched) == {whole_size(store, 10) + delta.size}
    assert not list(Audit(store).problems())


def test_followers_never_look_for_one(tmp_path: Path, models: list[dict[str, torch.Tensor]]) -> None:
    store = published(tmp_path, models)
    _, copy = store.update(None, 10)
    listed: list[str] = []

    class Listening(FileStore):
        def list(self, prefix: str) -> list[str]:
            listed.append(prefix)
            return super().list(prefix)

    WeightStore(Listening(f"file://{tmp_path}"), "r-1").update(copy, 11)
    assert not listed


def test_one_that_is_wrong_or_not_trusted_is_refused(
    tmp_path: Path, key_files: dict[str, Path], models: list[dict[str, torch.Tensor]]
) -> None:
    folder, own = tmp_path / "store", str(key_files["own"])
    store = published(folder, models, Keys(own))
    store.add_keyframe(10)
    trusting = WeightStore(
        open_store(f"file://{folder}"), "r-1", keys=Keys(None, [str(key_files["own.pub"])])
    )
    assert same(trusting.fetch(10)[1], models[10])
    file = folder / PREFIX / "keyframes/v000010.json"
    said = json.loads(file.read_text())
    for change, why in (
        ({"signature": None}, "v000010.json is not signed"),
        ({"created_at": 0.0}, "v000010.json is signed by none"),
        ({"version": 9}, "v000010.json is of run r-1, version 9 with root .* r-1, 10, .* is expected"),
        ({"root": "00"}, "with root 00; .* is expected"),
        ({"run": "r-2"}, "is of run r-2"),
        ({"chunks": 1}, r"(?s)v000010.json is not a weights keyframe: .*chunks"),
        ({"chunks": [{"hash": "../../../x", "size": 1}]}, r"(?s)is not a weights keyframe: .*chunks.0.hash"),
    ):
        file.write_text(json.dumps({**said, **change}))
        with pytest.raises(WeightsError, match=why):
            trusting.fetch(10)
        assert any(file.name in problem for problem in Audit(trusting).problems())
    file.write_text(json.dumps({**said, "chunks": said["chunks"][:0]}))
    with pytest.raises(WeightsError, match=r"v000010/manifest\.json: its chunks make wrong bits of"):
        weights(folder).fetch(10)


def test_versions_behind_one_may_go(tmp_path: Path, models: list[dict[str, torch.Tensor]]) -> None:
    store = published(tmp_path, models)
    for version in (6, 10):
        store.add_keyframe(version)
    found = store.collect(2, grace_s=0)
    assert (found.kept, found.removed) == (list(range(6, 12)), list(range(6)))
    for version in range(12, 20):
        models = [*models, changed(models[-1], version)]
        store.publish(version, models[-1], trainer_epoch=0)
    store.add_keyframe(18)
    found = store.collect(2, grace_s=0)
    assert found.kept == list(range(10, 20))
    files = chunk_files(tmp_path)
    assert {file.name for file in files} == {
        chunk.hash for manifest in store.manifests().values() for chunk in manifest.chunks
    }
    assert found.size == sum(file.stat().st_size for file in files)
    left = sorted(path.name for path in (tmp_path / PREFIX / "keyframes").iterdir())
    assert left == ["v000010.json", "v000018.json"]
    assert not list(Audit(store).problems())


def test_nothing_goes_while_somebody_puts(tmp_path: Path, models: list[dict[str, torch.Tensor]]) -> None:
    """What was garbage when a publisher began may be what it counts on."""
    published(tmp_path, models[:2])
    left = chunk_files(tmp_path)[0].with_name("ff")
    left.write_bytes(b"of a publisher that died")

    class Late(FileStore):
        """Somebody begins to publish when the first chunk is about to go."""

        def list(self, prefix: str) -> list[str]:
            found = super().list(prefix)
            if prefix.endswith("/chunks"):
                Lease(open_store(f"file://{tmp_path}"), PREFIX, 2, puts=True).renew()
            return found

    WeightStore(Late(f"file://{tmp_path}"), "r-1").collect(1, grace_s=0)
    assert left.exists()
    with Lease(open_store(f"file://{tmp_path}"), PREFIX, 2):
        pass


def test_what_was_collected_under_a_publisher_is_not_published(
    tmp_path: Path, models: list[dict[str, torch.Tensor]]
) -> None:
    published(tmp_path / "other", models[:1])
    (chunk,) = chunk_files(tmp_path / "other")
    known = tmp_path / "store" / PREFIX / "chunks" / chunk.name
    known.parent.mkdir(parents=True)
    known.write_bytes(chunk.read_bytes())

    class Collected(FileStore):
        def exists(self, key: str) -> bool:
            known.unlink()
            return super().exists(key)

    late = WeightStore(Collected(f"file://{tmp_path}/store"), "r-1")
    said = f"{chunk.name} was collected as garbage while it was published: publish the version again"
    with pytest.raises(WeightsError, match=said):
        late.publish(0, models[0], trainer_epoch=0)
    assert weights(tmp_path / "store").versions() == []
    assert late.publish(0, models[0], trainer_epoch=0)


def test_killed_at_any_write_all_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: list[dict[str, torch.Tensor]]
) -> None:
    """Publishing, a keyframe and a collection, one after the other, until they end."""

    def live(folder: Path, crash: Crash | None = None) -> Life:
        readers = itertools.count()
        life = Life(crash or Crash(), threading.Event(), Heart("r-1", "trainer", 0))
        names = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"reader-{next(readers)}"))
        monkeypatch.setattr(leases, "uuid", names)
        store = WeightStore(CrashingStore(f"file://{folder}", life), "r-1")
        with suppress(Killed):
            for version, model in enumerate(models):
                if version not in store.versions() and version >= min(store.versions(), default=0):
                    store.publish(version, model, trainer_epoch=0)
            for version in {7, 10} & set(store.versions()):
                store.add_keyframe(version)
            store.collect(2, grace_s=0)
        return life

    writes = live(tmp_path / "whole").writes
    assert weights(tmp_path / "whole").versions() == [7, 8, 9, 10, 11]
    behind = writes.index(f"put {PREFIX}/v000010/manifest.json")
    for number, crash in enumerate(crashes_of(writes[behind:])):
        folder = tmp_path / str(number)
        name, _, count = crash.write.rpartition(" ")
        later = Crash(f"{name} {writes[:behind].count(name) + int(count)}", crash.when)
        assert live(folder, later).dead, crash
        there = weights(folder)
        for version in there.versions()[-2:]:
            assert same(there.fetch(version)[1], models[version]), crash
        for lease in (folder / PREFIX / "leases").glob("*.json"):
            lease.unlink()  # else the next collection waits for ten minutes
        live(folder)
        assert there.versions()[-2:] == [10, 11] and there.versions()[0] >= 7, crash
        for version in there.versions():
            assert same(there.fetch(version)[1], models[version]), crash
        named = {chunk.hash for manifest in there.manifests().values() for chunk in manifest.chunks}
        assert {file.name for file in chunk_files(folder) if file.suffix != ".tmp"} == named, crash
        assert not list(Audit(there).problems()), crash


def test_the_commands(tmp_path: Path, models: list[dict[str, torch.Tensor]]) -> None:
    published(tmp_path, models)
    url = f"file://{tmp_path}/{PREFIX}"

    def run(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["weights", *words], env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return result.output

    assert "version 11 has a keyframe now" in run("keyframe", url)
    assert "version 10 has a keyframe" in run("keyframe", url, "--version", "10")
    assert "version 11 had a keyframe already" in run("keyframe", url)
    assert "has no version 12; it has 0–11" in run("keyframe", url, "--version", "12", code=1)
    assert "from nothing" in run("show", url)
    assert "12 versions, all whole" in run("verify", url)
    said = run("collect", url, "--keep", "1")
    assert (
        "10 versions, 0 chunks and 0 leftovers of killed writes are gone; 2 versions from 10 on stay" in said
    )
    assert " 0 chunks and" not in run("collect", url, "--keep", "1", "--grace", "0")
    assert "has no versions of weights" in run("collect", f"file://{tmp_path}/nothing/x", code=2)

"""The upkeep of versions on a real S3 server, by the flows on a real Prefect server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from infra.stack.local import Stack
from infra.stack.s3 import S3Access
from infra.stores.opening import open_store
from infra.stores.s3_store import FsspecStore
from infra.weights.bits import model_of
from infra.weights.folder import ModelFolder
from infra.weights.places import weights_at
from infra.weights.versions import WeightStore
from tests.factories import make_tiny_model
from tests.prefect_calls import ask
from tests.unit.test_weights import changed, same, series

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def url(s3: S3Access, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    return f"{s3.url}/{uuid4().hex}"


class Dies(FsspecStore):
    """Dies at a write, as by kill -9: before it, or when it is done."""

    def __init__(self, url: str, at: int) -> None:
        super().__init__(url)
        self._left, self.dead = at, False

    def _count(self) -> bool:
        """Whether this write is the last one."""
        if self.dead:
            raise KeyboardInterrupt
        self._left -= 1
        self.dead = self._left < 0
        return self.dead

    def put(self, key: str, data: bytes) -> None:
        last = self._count()
        super().put(key, data)
        if last:
            raise KeyboardInterrupt

    def put_new(self, key: str, data: bytes) -> None:
        last = self._count()
        super().put_new(key, data)
        if last:
            raise KeyboardInterrupt

    def delete(self, key: str) -> None:
        if self._count():
            raise KeyboardInterrupt
        super().delete(key)


def test_a_collection_on_s3_may_die_at_any_write(url: str) -> None:
    models = series(7)
    weights = WeightStore(open_store(url), "r-1")
    for version, model in enumerate(models):
        weights.publish(version, model, trainer_epoch=0)
    for version in (3, 5):
        weights.add_keyframe(version)
    assert weights.collect(1, grace_s=3600).kept == [3, 4, 5, 6]
    for version in range(7, 12):
        models.append(changed(models[-1], version))
        weights.publish(version, models[-1], trainer_epoch=0)
    for version in (8, 10):
        weights.add_keyframe(version)
    for at in range(100):
        store = Dies(url, at)
        try:
            found = WeightStore(store, "r-1").collect(1, grace_s=0)
        except KeyboardInterrupt:
            for lease in open_store(url).list("runs/r-1/weights/leases"):
                open_store(url).delete(lease)
            for version in (8, 10, 11):
                assert same(weights.fetch(version)[1], models[version]), at
        else:
            break
    assert at > 5 and found.kept == [8, 9, 10, 11] == weights.versions()
    assert same(weights.fetch(11)[1], models[11])
    named = {weights.chunk_key(chunk) for one in weights.manifests().values() for chunk in one.chunks}
    assert set(open_store(url).list("runs/r-1/weights/chunks")) == named
    assert len(open_store(url).list("runs/r-1/weights/keyframes")) == 2


@pytest.fixture
def prefect(prefect_stack: Stack, url: str) -> Iterator[Any]:
    """Runs a flow in a process of its own; what it returns, and its artifact."""
    env = {**os.environ, **prefect_stack.env(), "PYTHONPATH": str(ROOT)}

    def run(flow: str, **given: Any) -> tuple[Any, dict[str, Any]]:
        code = (
            f"import json\nfrom flows.weights import {flow}\n"
            f"print('result', json.dumps({flow}(**json.loads({json.dumps(given)!r}))))"
        )
        found = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert found.returncode == 0 or flow == "verify", found.stderr
        shown = ask("POST", f"{prefect_stack.prefect_api_url}/artifacts/filter", {})
        newest = max((a for a in shown if a["key"] == flow), key=lambda a: str(a["created"]))
        said = found.stdout.rpartition("result ")[2]
        return json.loads(said) if found.returncode == 0 else found.stderr, newest

    yield run


def test_the_flows(prefect: Any, url: str, tmp_path: Path) -> None:
    where = f"{url}/models/mine"
    weights, store = weights_at(where), open_store(f"{url}/models")
    model = make_tiny_model(tmp_path / "model")
    folder = ModelFolder(model)
    tensors = {name: folder.tensor(name).bfloat16() for name in folder.names}
    files = {name: (model / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    for version in range(3):
        weights.publish_model(version, model_of(tensors), files=files)
        tensors = changed(tensors, version, 0.002)
    row, artifact = prefect("keyframe", url=where)
    assert (row["version"], row["new"]) == (2, True) and row["bytes"] > 0 and row["seconds"] > 0
    assert json.loads(artifact["data"]) == [row] and artifact["type"] == "table"
    row, _ = prefect("verify", url=where)
    assert (row["version"], row["versions"], row["wrong"]) == (2, 3, 0) and row["bytes"] > 0
    row, artifact = prefect("promote", url=where, folder=str(tmp_path / "out"))
    assert ModelFolder(tmp_path / "out").root == weights.manifest(2).root
    assert row["bytes"] == weights.manifest(2).size and "from_pretrained" in artifact["description"]
    row, _ = prefect("collect", url=where, keep=1, grace_s=0)
    assert (row["version"], row["oldest"], row["removed"]) == (2, 0, 0)
    chunk = weights.chunk_key(weights.manifest(2).paths[0].chunks[0])
    store.put(chunk, b"x")
    said, artifact = prefect("verify", url=where)
    assert f"{chunk} is damaged" in said and f"{chunk} is damaged" in artifact["description"]
    assert json.loads(artifact["data"])[0]["wrong"] == 1

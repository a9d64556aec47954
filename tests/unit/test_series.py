"""What a publisher remembers on disk, and what becomes of its versions when the disk is full."""

from __future__ import annotations

import errno
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra.stores.file_store import FileStore
from infra.weights import series
from infra.weights.bits import Bits, Model
from infra.weights.gpu_bits import GpuBits
from infra.weights.series import Series
from infra.weights.versions import WeightStore

VERSIONS = 36


def models(count: int = VERSIONS) -> list[dict[str, Bits]]:
    """bf16 weights of which a few move from version to version."""
    rng = np.random.default_rng(0)
    data = rng.integers(0x3C00, 0x4000, 9000, dtype=np.uint16)
    found = []
    for _ in range(count):
        data = data + (rng.random(data.size) < 0.004).astype(np.uint16)
        found.append({"x": Bits("BF16", (data.size,), data)})
    return found


class Noting(FileStore):
    """Notes commits."""

    def __init__(self, url: str, events: list[str]) -> None:
        super().__init__(url)
        self._events = events

    def put_new(self, key: str, data: bytes) -> None:
        if key.endswith("manifest.json"):
            self._events.append(key.split("/")[-2])
        super().put_new(key, data)


@pytest.fixture
def spooled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order: files that are written, and manifests."""
    events: list[str] = []
    real = tempfile.TemporaryFile

    def noted(**given: Any) -> Any:
        if given.get("prefix") == "streamrl-weights-":  # others need files too
            events.append("file")
        return real(**given)

    monkeypatch.setattr("infra.weights.series.tempfile.TemporaryFile", noted)
    return events


def test_a_file_now_and_then_and_never_behind_the_manifest(tmp_path: Path, spooled: list[str]) -> None:
    weights = WeightStore(Noting(f"file://{tmp_path}", spooled), "r-1")
    for version, model in enumerate(models()):
        weights.publish_model(version, model)
    assert spooled.count("file") == len(range(0, VERSIONS, 8)), "one for all paths that begin there"
    for place, event in enumerate(spooled):
        if event == "file":
            assert int(spooled[place + 1].removeprefix("v")) % 8 == 0
    assert [path.since for path in weights.manifest(32).paths] == [31, None, 24, 0]


def test_no_more_than_two_models_lie_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    series, most = Series(), 0
    made: list[Any] = []
    monkeypatch.setattr("infra.weights.series._spooled", lambda model: made.append(model) or dict(model))
    from infra.weights.series import Held

    for version, model in enumerate(models(70)):
        series.spool(Held(version, "r", model))
        most = max(most, len({id(held) for held in series._skips.values()}))
    assert most == 2


@pytest.mark.parametrize("how", ["write", "open"])
def test_a_full_disk_for_temporary_files_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """/dev/full takes nothing, as a full disk does; then tempfile finds no folder either."""

    def full(**_: Any) -> Any:
        if how == "open":
            raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")
        return open("/dev/full", "r+b")

    monkeypatch.setattr("infra.weights.series.tempfile.TemporaryFile", full)
    weights = WeightStore(FileStore(f"file://{tmp_path}"), "r-1")
    with caplog.at_level(logging.WARNING, logger="streamrl.weights"):
        published = [weights.publish_model(version, model) for version, model in enumerate(models())]
    assert [manifest.version for manifest in published] == list(range(VERSIONS))
    assert len(caplog.records) == 1, "said once"
    assert "set TMPDIR" in caplog.text
    assert [path.since for path in published[1].paths] == [0], "one version's changes are told as before"
    assert [path.since for path in published[32].paths] == [31, None], "a whole version, and no long path"
    for version in (0, 8, 31, 35):
        _, copy = WeightStore(FileStore(f"file://{tmp_path}"), "r-1").update(None, version)
        assert copy.root == published[version].root


def test_weights_of_a_gpu_are_kept_piece_by_piece_beside_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of them lies in main memory, as without a GPU; what is asked for is looked at."""
    model = models(1)[0]
    there = {
        name: GpuBits(one.dtype, one.shape, torch.from_numpy(one.data.view(np.int16)))
        for name, one in model.items()
    }
    beside, pieces, plain = [False], list[int](), GpuBits.part

    @contextmanager
    def own_stream_for(model: Model) -> Iterator[None]:
        beside[0] = True
        yield
        beside[0] = False

    def part(self: GpuBits, start: int, count: int) -> np.ndarray:
        assert beside[0]
        pieces.append(count)
        return plain(self, start, count)

    monkeypatch.setattr(series, "own_stream_for", own_stream_for)
    monkeypatch.setattr(series, "_PIECE", 1000)
    monkeypatch.setattr(GpuBits, "part", part)
    kept = series._spooled(there)
    assert all(np.array_equal(kept[name].data, one.data) for name, one in model.items())
    assert set(pieces) == {1000}

"""Sizes that a liar claims: refused before memory or time is taken for them, with the object's name."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zstandard

from infra.stores.opening import open_store
from infra.weights import limits
from infra.weights.bits import Bits, file_model
from infra.weights.codec.chunks import decode_chunk, encode_model
from infra.weights.codec.groups import SAME, Head, Span
from infra.weights.codec.tiles import TILE
from infra.weights.digest import root_digest
from infra.weights.manifest import parsed
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def manifest(tmp_path: Path) -> dict[str, Any]:
    store = WeightStore(open_store(f"file://{tmp_path}"), "r-1")
    said: dict[str, Any] = json.loads(store.publish(0, TENSORS, trainer_epoch=0).raw)
    return said


def shaped(*shape: int) -> Callable[[dict[str, Any]], object]:
    def change(said: dict[str, Any]) -> object:
        return said["tensors"]["a"].update(shape=list(shape))

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (shaped(1 << 40, 1 << 30), "of a model of .* bytes, and .* are the most"),
        (shaped(1 << 47), "of a model of .* bytes"),
        (shaped(1 << 80), "shape"),
        (shaped(*[2] * 17), "shape"),
        (lambda said: said["tensors"].update(__metadata__=said["tensors"]["a"]), "__metadata__"),
        (lambda said: said["paths"][0]["chunks"].append({"hash": "00", "size": 1 << 40}), "size"),
        (lambda said: said["paths"].extend(said["paths"] * 100), "paths"),
        (lambda said: said.update(version=1 << 40), "version"),
        (lambda said: said.update(root="00"), "its root is not that of its tensors"),
        (lambda said: said.update(files={"a\0b": {"hash": "00", "size": 1}}), "files"),
    ],
)
def test_a_manifest_says_no_more_than_can_be(
    change: Callable[[dict[str, Any]], object], why: str, tmp_path: Path
) -> None:
    said = manifest(tmp_path)
    change(said)
    with pytest.raises(WeightsError, match=f"(?s)^here.*{why}"):
        parsed(json.dumps(said).encode(), "here")


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"[" * 100_000, "can't be read"),
        (b'{"version":' * 100_000, "can't be read"),
        (b'{"version": ' + b"9" * 10_000 + b"}", "can't be read"),
        (b"[" + b"1," * (3 << 20) + b"1]", "values; .* are the most"),
        (b" " * (limits.MANIFEST + 1), "bytes; .* are the most"),
        (b"\xff\xfe", "can't be read"),
        (b"[]", "is not a weights manifest"),
    ],
    ids=["lists", "objects", "digits", "values", "bytes", "text", "list"],
)
def test_json_is_bounded_before_it_is_read(raw: bytes, why: str) -> None:
    with pytest.raises(WeightsError, match=f"^here.*{why}"):
        parsed(raw, "here")


def test_what_this_machine_may_hold_can_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.dumps(manifest(tmp_path)).encode()
    monkeypatch.setenv(limits.LARGEST_MODEL_VARIABLE, "32")
    assert parsed(raw, "here").size == 32
    monkeypatch.setenv(limits.LARGEST_MODEL_VARIABLE, "31")
    with pytest.raises(WeightsError, match="STREAMRL_LARGEST_MODEL"):
        parsed(raw, "here")
    monkeypatch.setenv(limits.LARGEST_MODEL_VARIABLE, "all")
    with pytest.raises(WeightsError, match="STREAMRL_LARGEST_MODEL=all: a number of bytes"):
        parsed(raw, "here")


def test_what_is_packed_is_counted_as_it_comes() -> None:
    assert limits.unpacked_within_limits(zstandard.compress(b"x" * 1000), "it", most=1000) == b"x" * 1000
    bombs = [
        zstandard.compress(bytes(1 << 30)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 28)),
        b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00",  # says that it has 2^40
    ]
    tracemalloc.start()
    for bomb in bombs:
        with pytest.raises(WeightsError, match=r"^it (is damaged: unpacked it has more|was packed wrongly)"):
            limits.unpacked_within_limits(bomb, "it", most=1 << 20)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def chunk(*heads: tuple[Head, bytes]) -> bytes:
    head = msgspec.msgpack.encode([1, TILE, [one for one, _ in heads]])
    return struct.pack("<4sI", b"SRWC", len(head)) + head + b"".join(body for _, body in heads)


def model(size: int = 1 << 20) -> dict[str, Bits]:
    return {"w": Bits("BF16", (size,), np.zeros(size, np.uint16))}


def test_a_chunk_names_each_element_once() -> None:
    spans = [Span("w", 0, 10), Span("w", 20, 10), Span("w", 9, 2)]
    with pytest.raises(WeightsError, match=r"it is damaged: it names w\[9:11\] more than once"):
        decode_chunk(chunk((Head("BF16", SAME, 1, spans, 48), bytes(48))), model(), "it")
    apart = [(Head("BF16", SAME, 1, [Span("w", 0, 10)], 16), bytes(16))] * 2
    with pytest.raises(WeightsError, match=r"names w\[0:10\] more than once"):
        decode_chunk(chunk(*apart), model(), "it")


def test_many_spans_cost_no_more_than_their_bytes() -> None:
    """All of a tensor, over and over: a chunk of a megabyte took gigabytes."""
    spans = [Span("w", 0, 1 << 20)] * 90_000
    data = chunk((Head("BF16", SAME, 8, spans, 16), bytes(16)))
    began = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(WeightsError, match=r"it is damaged|it ends too soon"):
        decode_chunk(data, model(), "it")
    assert tracemalloc.get_traced_memory()[1] < 64 * len(data)
    tracemalloc.stop()
    assert time.perf_counter() - began < 10.0


def test_a_group_is_no_larger_than_publishers_make_them() -> None:
    size = 128 << 20
    data = chunk((Head("BF16", SAME, 1, [Span("w", 0, size)], 128 * 16), bytes(128 * 16)))
    held = {"w": Bits("BF16", (size,), np.zeros(1, np.uint16).repeat(1))}
    held["w"] = Bits("BF16", (size,), np.broadcast_to(np.uint16(0), size))
    with pytest.raises(WeightsError, match=r"a group of .* bytes; .* are the most"):
        decode_chunk(data, held, "it")


def test_a_way_names_each_element_once_in_all_of_its_chunks(tmp_path: Path) -> None:
    """The same chunk twice: what it says was right is no reason to do it again."""
    store = WeightStore(open_store(f"file://{tmp_path}"), "r-1")
    said = json.loads(store.publish(0, TENSORS, trainer_epoch=0).raw)
    said["paths"][0]["chunks"] *= 2
    (tmp_path / store.manifest_key(0)).write_text(json.dumps(said))
    with pytest.raises(WeightsError, match="more than once"):
        store.fetch(0)


def header(said: Any, body: int = 8) -> bytes:
    raw = said if isinstance(said, bytes) else json.dumps(said).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(body)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little"), header(b"[" * 100_000), header([]),
        header({"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}),
        header({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "ab"}),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
        header({"a": {"dtype": "F4", "shape": [15], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, body=80),
    ],
)  # fmt: skip
def test_a_file_s_header_is_checked(data: bytes) -> None:
    with pytest.raises(ValueError):
        file_model(data)


def test_a_model_beyond_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit raised too far: the error names the model's size, and no thread dies of it."""
    monkeypatch.setenv(limits.LARGEST_MODEL_VARIABLE, "1e30")
    store, said = WeightStore(open_store(f"file://{tmp_path}"), "r-1"), manifest(tmp_path)
    said["tensors"]["a"]["shape"] = [1 << 47, 1 << 14]
    said["root"] = root_digest({name: one["digest"] for name, one in said["tensors"].items()})
    (tmp_path / store.manifest_key(0)).write_text(json.dumps(said))
    with pytest.raises(WeightsError, match="no memory for a model of"):
        store.fetch(0)


def test_good_chunks_are_still_taken() -> None:
    new = model(3 * TILE + 5)
    new["w"].data[:] = np.random.default_rng(0).integers(0, 1 << 14, new["w"].data.size)
    held = model(3 * TILE + 5)
    for data in encode_model(None, new):
        decode_chunk(data, held, "it")
    assert (held["w"].data == new["w"].data).all()


def test_of_an_object_that_is_larger_than_its_manifest_says_no_more_is_read(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    store = WeightStore(open_store(url), "r-1")
    manifest = store.publish(0, TENSORS, trainer_epoch=0)
    (path,) = manifest.paths
    key = store.chunk_key(path.chunks[0])
    with (tmp_path / key).open("ab") as file:
        file.truncate(1 << 40)  # a hole: it takes no disk
    with pytest.raises(WeightsError, match="is damaged: it has other bytes than its name says"):
        store.fetch(0)
    assert len(open_store(url).get(key, 10)) == 11


def test_of_a_manifest_no_more_is_read_than_one_may_have(tmp_path: Path) -> None:
    store = WeightStore(open_store(f"file://{tmp_path}"), "r-1")
    store.publish(0, TENSORS, trainer_epoch=0)
    with (tmp_path / store.manifest_key(0)).open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(WeightsError, match=rf"has {limits.MANIFEST + 1} bytes; .* are the most"):
        store.fetch(0)

"""Weights that lie on a GPU are scanned, changed and hashed there: the same chunks, and the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.stores.opening import open_store
from infra.weights.bits import Bits
from infra.weights.codec import chunks
from infra.weights.codec.decoding import StaleTile
from infra.weights.codec.groups import BANDED, ROWED, SAME, WHOLE
from infra.weights.codec.tiles import TILE
from infra.weights.gpu_bits import GpuBits, gpu_bits_of
from infra.weights.inspection import inspected
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError

CUDA = torch.device("cuda")


def there(model: Mapping[str, Bits]) -> dict[str, GpuBits]:
    return {
        name: GpuBits(one.dtype, one.shape, torch.from_numpy(one.data.view(f"i{one.data.itemsize}")).to(CUDA))
        for name, one in model.items()
    }


def drawn(changed: float) -> tuple[dict[str, Bits], dict[str, Bits]]:
    """Tensors of all types; large, small and tiny; and one of which few rows change."""
    rng, old, new = np.random.default_rng(0), {}, {}
    for name, shape in (
        ("a", (1500, 2048)),
        ("b", (70_000, 64)),
        ("c", (777,)),
        ("d", (1,)),
        ("e", (1 << 20,)),
    ):
        weights = rng.normal(0, 0.02, shape).astype(np.float32).reshape(-1)
        before = (weights.view(np.uint32) >> 16).astype(np.uint16)
        after = np.where(rng.random(before.size) < changed, before + rng.integers(-2, 3, before.size), before)
        old[name] = Bits("BF16", shape, before)
        new[name] = Bits("BF16", shape, after.astype(np.uint16))
    rows = rng.integers(0, 1 << 16, (30_000, 100), np.uint16)
    old["rows"] = Bits("BF16", rows.shape, rows.copy().reshape(-1))
    rows[rng.integers(0, 30_000, 500)] ^= 3
    new["rows"] = Bits("BF16", rows.shape, rows.reshape(-1))
    for dtype, kind in (("F32", np.uint32), ("F16", np.uint16), ("I8", np.uint8), ("F64", np.uint8)):
        size = 800_000
        before = rng.integers(0, np.iinfo(kind).max, size, kind)
        after = np.where(rng.random(size) < changed, before ^ rng.integers(1, 9, size).astype(kind), before)
        shape = (size // 8,) if dtype == "F64" else (size,)
        old[dtype], new[dtype] = Bits(dtype, shape, before), Bits(dtype, shape, after)
    return old, new


@pytest.mark.parametrize("changed", [0.0, 0.003, 0.03, 0.3, 1.0])
def test_chunks_are_those_of_the_processor_and_lead_to_the_same_weights(changed: float) -> None:
    old, new = drawn(changed)
    expected, full = (list(chunks.encode_model(base, new)) for base in (old, None))
    on_gpu = there(new)
    for base, threads in ((there(old), 4), (there(old), 1), (old, 4)):
        assert list(chunks.encode_model(base, on_gpu, threads=threads)) == expected
    assert list(chunks.encode_model(None, on_gpu, threads=4)) == full
    modes = {head.mode for one in (*expected, *full) for head, _ in chunks.heads_of(one, "it")}
    assert modes >= ({SAME, ROWED, WHOLE} if not changed else {BANDED, ROWED, WHOLE})
    for sent in (expected, full):
        held = there(old)
        for again in (False, True):
            tiles = [tile for chunk in sent for tile in chunks.decode_chunk(chunk, held, "it", threads=4)]
            assert bool(tiles) != again
            assert all(np.array_equal(held[name].data, new[name].data) for name in new)


def test_what_is_damaged_or_for_other_weights_is_refused_and_changes_nothing() -> None:
    old, new = drawn(0.03)
    old, new = ({name: one[name] for name in ("a", "rows")} for one in (old, new))
    (chunk,) = chunks.encode_model(old, new)
    rng, said = np.random.default_rng(1), set()
    for _ in range(30):
        some = bytearray(chunk)
        some[rng.integers(len(chunk) // 2, len(chunk))] ^= 1 << rng.integers(8)
        found = []
        for held in (
            {name: Bits(one.dtype, one.shape, one.data.copy()) for name, one in old.items()},
            there(old),
        ):
            with pytest.raises(WeightsError) as raised:
                chunks.decode_chunk(bytes(some), held, "it")
            found.append((str(raised.value), {name: one.data.tobytes() for name, one in held.items()}))
        assert found[0] == found[1]
        said.add(found[0][0])
    assert any("makes other bits" in one for one in said)
    stale = there(old)
    stale["a"].tensor[5] += 1
    before = stale["a"].tensor[:TILE].clone()
    with pytest.raises(StaleTile, match="a"):
        chunks.decode_chunk(chunk, stale, "it", threads=4)
    assert torch.equal(before, stale["a"].tensor[:TILE])


def test_weights_are_read_after_what_was_queued_before() -> None:
    """The codec's streams wait for the stream on which the weights are made."""
    old, new = drawn(0.03)
    expected, later, busy = (
        list(chunks.encode_model(old, new)),
        there(new),
        torch.randn(8192, 8192, device=CUDA),
    )
    made = {name: GpuBits(one.dtype, one.shape, torch.zeros_like(one.tensor)) for name, one in later.items()}
    base = there(old)
    for _ in range(20):
        busy = busy @ busy
    for name, one in made.items():
        one.tensor.copy_(later[name].tensor)
    assert list(chunks.encode_model(base, made, threads=4)) == expected


def test_under_deterministic_algorithms_as_in_training() -> None:
    old, new = drawn(0.03)
    expected = list(chunks.encode_model(old, new))
    torch.use_deterministic_algorithms(True)
    try:
        held = there(old)
        assert list(chunks.encode_model(held, there(new), threads=4)) == expected
        for chunk in expected:
            chunks.decode_chunk(chunk, held, "it", threads=4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(np.array_equal(held[name].data, new[name].data) for name in new)


def test_hashes_of_tensors_are_those_in_main_memory() -> None:
    tensors = {name: torch.randn(size) for name, size in (("a", 5_000_001), ("b", 30), ("c", 0))}
    tensors["a"] = tensors["a"].bfloat16()
    on_gpu = {name: tensor.to(CUDA) for name, tensor in tensors.items()}
    assert inspected(on_gpu) == inspected(tensors)
    on_gpu["b"][3] = torch.nan
    assert inspected(on_gpu).wrong == "b"


def test_a_version_published_from_a_gpu_is_that_from_main_memory(tmp_path: Path) -> None:
    old, new = ({name: torch.randn(300, 500).bfloat16() for name in "ab"} for _ in "on")
    for name, tensor in new.items():
        tensor[:, 50:] = old[name][:, 50:]
    stored = []
    for number, device in enumerate(("cpu", "cuda")):
        store = WeightStore(open_store(f"file://{tmp_path / str(number)}"), "run")
        for version, tensors in enumerate((old, new)):
            there = {name: tensor.to(device) for name, tensor in tensors.items()}
            store.publish(version, there, trainer_epoch=1, known=inspected(there))
        stored.append([store.manifest(version).paths for version in (0, 1)])
        assert all(torch.equal(new[name], tensor) for name, tensor in store.fetch(1)[1].items())
    assert stored[0] == stored[1]


def test_what_is_not_finite_is_found() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2):
        for value, finite in ((1.0, True), (float("inf"), False), (float("nan"), False)):
            weights = torch.ones(100_001, device=CUDA)
            weights[100_000] = value
            assert gpu_bits_of(weights.to(dtype)).finite() == finite

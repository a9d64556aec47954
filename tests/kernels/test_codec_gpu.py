"""The codec's GPU kernels, in Triton's interpreter: what they make is what the processor makes, bit for bit.

Triton also compiles them for an H100, which needs no GPU: see test_triton_shapes.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from infra.weights import gpu_inspection
from infra.weights.arrays import Array
from infra.weights.bits import NAMES, Bits, bits_of, kind_of
from infra.weights.codec import chunks
from infra.weights.codec.groups import BANDED, ROWED, SAME, WHOLE
from infra.weights.codec.tiles import tile_hash
from infra.weights.digest import digests_of
from infra.weights.gpu_bits import GpuBits, gpu_bits_of
from infra.weights.gpu_transfer import uploaded
from tests.triton_kernels import interpreted, print_launches


def drawn(dtype: str, changed: float, count: int) -> tuple[Array, Array]:
    rng, kind = np.random.default_rng(count), kind_of(dtype)
    old, other = (rng.integers(0, 1 << kind.bits, count, dtype=np.uint64).astype(kind.unsigned) for _ in "ab")
    return old, np.where(rng.random(count) < changed, other, old)


def laid(dtype: str, *arrays: Array) -> tuple[Any, torch.Tensor]:
    """Tiles that lie one behind the other."""
    from infra.weights.codec.laid_tiles import LaidTiles, Source

    sources = [Source(torch.from_numpy(one.view(f"i{one.itemsize}").copy()), 0, one.size) for one in arrays]
    tiles = LaidTiles([one.size for one in arrays], kind_of(dtype), torch.device("cpu"))
    return tiles, tiles.lay(sources)


def hashes() -> None:
    """Tiles of lengths at which XXH3 goes another way."""
    rng = np.random.default_rng(0)
    sizes = [1, 240, 241, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 5000, 20480]
    parts = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    tiles, flat = laid("U8", *parts)
    queued = tiles.hashes(flat)
    assert queued.told(*(part.numpy() for part in queued.parts)) == [tile_hash(part) for part in parts]


def models() -> tuple[dict[str, Bits], dict[str, Bits]]:
    """All types; tensors that fill no page, in which nothing changes, or all, or only some rows."""
    old: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    for number, (dtype, changed, count) in enumerate([
        ("BF16", 0.02, 2100), ("BF16", 0.5, 300), ("BF16", 0.0, 3000), ("BF16", 1.0, 1), ("BF16", 0.1, 1024),
        ("F16", 0.0, 1), ("F16", 0.0, 2500), ("I8", 1.0, 1100), ("F32", 0.05, 1100), ("F32", 1.0, 200),
        ("U8", 0.05, 4096), ("F64", 0.1, 300),
    ]):  # fmt: skip
        for model, data in zip(
            (old, new), drawn(dtype, changed, count * (8 if dtype == "F64" else 1)), strict=True
        ):
            model[f"t{number}"] = Bits(dtype, (count,), data)
    weights = np.random.default_rng(2).normal(0, 0.02, 1500).astype(np.float32).view(np.uint32) >> 16
    old["w"] = Bits("BF16", (1500,), weights.astype(np.uint16))
    moved = weights + (np.random.default_rng(3).random(1500) < 0.05)
    new["w"] = Bits("BF16", (1500,), moved.astype(np.uint16))
    rows = np.random.default_rng(1).integers(0, 1 << 16, (100, 67), np.uint16)
    old["rows"] = Bits("BF16", rows.shape, rows.copy().reshape(-1))
    rows[[3, 50, 51, 99]] ^= 1
    new["rows"] = Bits("BF16", rows.shape, rows.reshape(-1))
    return old, new


def there(model: Mapping[str, Bits]) -> dict[str, GpuBits]:
    """A model as on a GPU; the interpreter takes the processor for one."""
    return {
        name: GpuBits(one.dtype, one.shape, torch.from_numpy(one.data.view(f"i{one.data.itemsize}").copy()))
        for name, one in model.items()
    }


def small_tiles(size: int) -> None:
    from infra.weights.codec import chunks, encoding, groups, tiles

    for module in (tiles, groups, chunks, encoding):
        module.TILE = size  # type: ignore[attr-defined]
    encoding._SAMPLE = 4096  # elements: fewer than there are, so stretches are skipped


def same_chunks() -> None:
    """Chunks are those of the processor, with old weights and without."""
    old, new = models()
    for size in (1 << 20, 1024):
        small_tiles(size)
        expected = list(chunks.encode_model(old, new))
        modes = {head.mode for chunk in expected for head, _ in chunks.heads_of(chunk, "it")}
        assert modes == {SAME, BANDED, WHOLE, ROWED}, size
        for base in (there(old), old)[: 1 + (size > 1024)]:  # the old model may lie in main memory
            assert list(chunks.encode_model(base, there(new), threads=2)) == expected, size
        assert list(chunks.encode_model(None, there(new))) == list(chunks.encode_model(None, new)), size


def without_room() -> None:
    """Where the GPU runs out of memory the processor looks for changes."""
    from infra.weights.codec import gpu_encoding

    old, new = models()
    small_tiles(1024)
    scanned, runs = gpu_encoding._Run.scanned, itertools.count()

    def sometimes(run: gpu_encoding._Run) -> object:
        if next(runs) % 2:
            return scanned(run)
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu_encoding._Run.scanned = sometimes  # type: ignore[assignment]
    assert list(chunks.encode_model(there(old), there(new))) == list(chunks.encode_model(old, new))
    assert next(runs) > 2


def finite() -> None:
    for dtype in ("BF16", "F16", "F32", "F64", "F8_E5M2", "F8_E4M3", "I32"):
        for value in (1.0, float("inf"), -float("inf"), float("nan")):
            values = torch.ones(3000, dtype=getattr(torch, NAMES[dtype][0]))
            if values.is_floating_point():
                values[2000] = value
            assert gpu_bits_of(values).finite() == bits_of(values).finite(), (dtype, value)


def digests() -> None:
    """Hashes, and the look for NaN, are those of main memory, whatever the pieces."""
    gpu_inspection._PIECE = 1000
    tensors = {
        "a": torch.randn(999, 3).bfloat16(),
        "b": torch.randn(7),
        "c": torch.ones(()),
        "d": torch.ones(0),
    }
    for wrong in ("", "b"):
        found = gpu_inspection.inspected_there(tensors, 2)
        assert {name: digest for name, (digest, _) in found.items()} == digests_of(tensors)
        assert [name for name, (_, fine) in found.items() if not fine] == [wrong] * bool(wrong)
        tensors["b"][3] = torch.nan


def launches() -> None:
    """Print how the codec launches its kernels: test_triton_shapes.py compiles them so."""
    from infra.weights.codec import gpu_kernels

    def work() -> None:
        for dtype in ("BF16", "F32", "U8"):
            old, new = ({"t": Bits(dtype, (1500,), data)} for data in drawn(dtype, 0.1, 1500))
            list(chunks.encode_model(there(old), there(new)))

    print_launches(gpu_kernels, work)


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32"])
def test_old_weights_are_brought_over_as_new_ones_lie_there(dtype: str) -> None:
    bits = Bits(dtype, (3000,), drawn(dtype, 0.0, 3000)[0])
    (brought,), lies = uploaded(torch.device("cpu"), bits.data), there({"t": bits})["t"].tensor
    assert brought.dtype == lies.dtype
    assert not bool((brought != lies).any())


@pytest.mark.parametrize("compares", [hashes, same_chunks, without_room, finite, digests])
@pytest.mark.thorough(but=["hashes", "without_room", "finite", "digests"])
def test_kernels_make_what_the_processor_makes(compares: Callable[[], None]) -> None:
    interpreted(compares)

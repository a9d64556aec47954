"""The codec's GPU kernels, in Triton's interpreter: what they make is what numpy makes, number for number.

Triton also compiles them for an H100, which needs no GPU.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from infra.weights.arrays import Array
from infra.weights.bits import Bits, kind_of
from infra.weights.codec.scan import SCAN_VARIABLE, scanner
from infra.weights.codec.tiles import tile_hash
from infra.weights.weights_error import WeightsError
from tests.triton_kernels import check_compiles, interpreted, print_launches


def drawn(dtype: str, changed: float, count: int) -> tuple[Array, Array]:
    rng, kind = np.random.default_rng(count), kind_of(dtype)
    old, other = (rng.integers(0, 1 << kind.bits, count, dtype=np.uint64).astype(kind.unsigned) for _ in "ab")
    return old, np.where(rng.random(count) < changed, other, old)


def scans() -> None:
    """All types, in a process in which Triton interprets; with as many bands as fill one word, or two."""
    from infra.weights.codec import scan_gpu, scan_plain

    for dtype, changed, bands in itertools.product(["BF16", "F16", "F32", "U8"], [0.0, 0.05, 1.0], [5, 16]):
        kind = kind_of(dtype)
        pairs = [drawn(dtype, changed, count) for count in (1, 1024, 700, 2500)]
        edges = np.unique(np.arange(bands) * kind.exponents // bands).astype(np.uint8)
        expected = [scan_plain.scan(*pair, kind, edges, pair[0].size) for pair in pairs]
        for found, one in zip(scan_gpu.scan(pairs, kind, edges, 2500), expected, strict=True):
            assert found is not None
            assert one is not None
            for name in ("begins", "ends", "gaps", "steps"):
                assert np.array_equal(getattr(found, name), getattr(one, name)), name
                assert getattr(found, name).dtype == getattr(one, name).dtype, name
            assert (found.before, found.after) == (one.before, one.after)
        tiles = [old.copy() for old, _ in pairs]
        assert list(scan_gpu.apply(tiles, kind, edges, expected)) == [True] * 4
        assert all(np.array_equal(tile, new) for tile, (_, new) in zip(tiles, pairs, strict=True))
        third = expected[2]
        if not third.gaps.size:
            continue
        most = [one.gaps.size for one in expected]
        some = list(scan_gpu.scan(pairs[:3], kind, edges, most[2] - 1))
        assert [one is None for one in some] == [count >= most[2] for count in most[: len(some)]]
        assert some[-1] is None
        for more in (1, 700):  # to a neighbour, or to where there is none
            tiles = [old.copy() for old, _ in pairs]
            third.gaps[-1] += more
            assert list(scan_gpu.apply(tiles, kind, edges, expected)) == [True, True, False, True]
            assert np.array_equal(tiles[2], pairs[2][0])
            assert np.array_equal(tiles[3], pairs[3][1])


def hashes() -> None:
    """Tiles of lengths at which XXH3 goes another way."""
    from infra.weights.codec.gpu_hash import tile_hashes

    sizes = [1, 240, 241, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 5000, 20480]
    starts = 4096 * np.arange(len(sizes))
    flat = np.random.default_rng(0).integers(0, 256, 4096 * 17, np.uint8)
    expected = [tile_hash(flat[at : at + size]) for at, size in zip(starts, sizes, strict=True)]
    assert tile_hashes(torch.from_numpy(flat), starts, np.array(sizes)) == expected


def whole_way() -> None:
    """From models to chunks and back, where STREAMRL_SCAN says what scans."""
    from infra.weights.codec import chunks, encoding, groups, tiles

    for module in (tiles, groups, chunks, encoding):
        module.TILE = 256  # type: ignore[attr-defined]
    old, new = {}, {}
    for number, (dtype, changed, count) in enumerate(
        [("BF16", 0.02, 900), ("BF16", 0.5, 300), ("F32", 0.05, 300), ("U8", 0.05, 70)]
    ):
        for model, data in zip((old, new), drawn(dtype, changed, count), strict=True):
            model[f"t{number}"] = Bits(dtype, (count,), data)
    rows = np.random.default_rng(1).integers(0, 1 << 16, (100, 64), np.uint16)
    old["rows"] = Bits("BF16", rows.shape, rows.copy().reshape(-1))
    rows[[3, 50]] ^= 1
    new["rows"] = Bits("BF16", rows.shape, rows.reshape(-1))
    found = {}
    for which in ("plain", "cuda"):
        os.environ[SCAN_VARIABLE] = which
        held = {name: Bits(one.dtype, one.shape, one.data.copy()) for name, one in old.items()}
        found[which] = list(chunks.encode_model(old, new))
        for chunk in found[which]:
            chunks.decode_chunk(chunk, held, "it")
        assert all(np.array_equal(held[name].data, new[name].data) for name in new), which
    assert found["plain"] == found["cuda"]


def launches() -> None:
    """Print how the codec launches its kernels."""
    from infra.weights.codec import gpu_kernels, scan_gpu

    def work() -> None:
        for dtype in ("BF16", "F32", "U8"):
            kind, (old, new) = kind_of(dtype), drawn(dtype, 0.1, 1500)
            edges = np.arange(min(16, kind.exponents)).astype(np.uint8)
            changes = list(scan_gpu.scan([(old, new)], kind, edges, 1500))
            assert list(scan_gpu.apply([old], kind, edges, changes)) == [True]

    print_launches(gpu_kernels, work)


@pytest.mark.parametrize("compares", [scans, hashes, whole_way])
def test_kernels_make_what_numpy_makes(compares: Callable[[], None]) -> None:
    interpreted(compares)


def test_kernels_compile_for_an_h100() -> None:
    from infra.weights.codec import gpu_kernels

    check_compiles(gpu_kernels, interpreted(launches))


def test_without_a_gpu_there_is_an_error_that_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    pair = drawn("BF16", 0.5, 10)
    with pytest.raises(WeightsError, match="on a GPU, but torch sees none: unset STREAMRL_SCAN"):
        list(scanner("cuda").scan([pair], kind_of("BF16"), np.zeros(1, np.uint8), 10))

"""What encoding and decoding hold beside input and output: three tiles for each thread, whatever changes.

In a process of its own, by what the system counts: numba, pcodec and zstd tell nobody what they take.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from infra.weights.bits import Bits
from infra.weights.codec import chunks, tiles

ROOT = Path(__file__).parents[2]
RESET = Path("/proc/self/clear_refs")  # of the peak
TILE = 2 * tiles.TILE  # bytes of one
TILES = 20


def drawn(changed: float, count: int) -> tuple[dict[str, Bits], dict[str, Bits]]:
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(count, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old + (rng.random(count, np.float32) < changed).astype(np.uint16)
    old_model, new_model = ({"w": Bits("BF16", (count,), data)} for data in (old, new))
    return old_model, new_model


def status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def grown(do: Callable[[], object]) -> int:
    """By how many bytes this process becomes larger meanwhile, at most."""
    RESET.write_text("5")
    before = status("VmRSS")
    do()
    return status("VmHWM") - before


def measure(threads: int, changed: float | None) -> None:
    """In the process that is measured; without changes: from nothing."""
    old, new = drawn(0.0 if changed is None else changed, TILES * tiles.TILE)
    few, less = drawn(0.5, 1000)
    for chunk in [*chunks.encode_model(few, less, threads=threads), *chunks.encode_model(None, less)]:
        chunks.decode_chunk(chunk, few, "it")  # what is compiled or loaded first is no scratch
    sent: list[bytes] = []
    base = None if changed is None else old
    taken = grown(lambda: sent.extend(chunks.encode_model(base, new, threads=threads)))
    # All of the output is there at the end, and what a chunk is made of a little longer.
    taken -= sum(map(len, sent)) + max(map(len, sent))
    assert taken <= 3 * TILE * threads, f"encoding: {taken / TILE:.2f} tiles"
    if base is None:
        old["w"].data[:] = 0
    taken = grown(lambda: [chunks.decode_chunk(chunk, old, "it", threads=threads) for chunk in sent])
    assert taken <= 3 * TILE * threads, f"decoding: {taken / TILE:.2f} tiles"
    assert np.array_equal(old["w"].data, new["w"].data)


@pytest.mark.skipif(not os.access(RESET, os.W_OK), reason="the system does not count here")
@pytest.mark.parametrize(("threads", "changed"), [(1, 0.02), (2, 0.1), (1, 0.9), (2, None)])
def test_three_tiles_a_thread_are_enough(threads: int, changed: float | None) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }  # what is free is given back
    code = f"from tests.long.test_codec_memory import measure; measure({threads}, {changed})"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

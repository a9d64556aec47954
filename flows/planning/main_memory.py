"""Main memory of machines whose processes share it, as with hardware CPU: who takes how much.

each generator     its process, the model's weights, its KV cache
the trainer        of its weights in float32: gradients, moments, copies that are published

Nothing is freed in turns there: an engine on a CPU that rests keeps all it has.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from schemas.runspec import RunSpec

GIB_BYTES = 1 << 30
CORE_BYTES = 4 * GIB_BYTES  # of a machine whose memory nobody says, for each core: as in the hardware table
_PROCESS_BYTES = 0.8 * GIB_BYTES  # of a process with torch and vLLM, before it has a model
_TRAINED_BYTES = 8.6 * 4  # of each parameter, at the most: as docs/benchmarks.md says
_RANK_BYTES = 2 * 4  # of each parameter, of each further rank: weights and gradients
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_here() -> float:
    """Return the bytes of this machine's main memory, or of its container's share."""
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):  # "max" is no number: then there is no limit
        whole = min(whole, float(_GROUP_LIMIT.read_text()))
    return whole


def in_gib(size: float) -> str:
    """Write a number of bytes in GiB."""
    return f"{size / GIB_BYTES:.1f} GiB"


def generator_bytes(spec: RunSpec, weights: float) -> float:
    """Return the main memory that a generator takes. `weights`: bytes of the model as it is published."""
    return _PROCESS_BYTES + weights + (kv_cache_bytes(spec) or 0.0)


def kv_cache_bytes(spec: RunSpec) -> float | None:
    """Return the bytes of a generator's KV cache on a CPU; None: the engine has no such setting."""
    mib = getattr(spec.generator, "kv_cache_mib", None)
    return None if mib is None else float(mib * (1 << 20))


def trainer_bytes(parameters: float, ranks: int) -> float:
    """Return the main memory that all ranks of a trainer take together."""
    return ranks * _PROCESS_BYTES + parameters * (_TRAINED_BYTES + (ranks - 1) * _RANK_BYTES)

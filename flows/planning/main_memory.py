"""Main memory of machines whose processes share it, as with hardware CPU: who takes how much.

each generator     its process, the model's weights, its KV cache
the trainer        its ranks' processes, all that they keep and compute with, copies that are published

Nothing is freed in turns there: an engine on a CPU that rests keeps all it has. A trainer on GPUs takes main
memory for copies that are published, and for moments that `trainer.offload_optimizer` keeps there.
"""

from __future__ import annotations

from flows.planning.learner_memory import LearnerMemory
from producers.engines.vllm_engine import VllmSettings
from schemas.runspec import RunSpec

GIB_BYTES = 1 << 30
CORE_BYTES = 4 * GIB_BYTES  # of a machine whose memory nobody says, for each core: as in the hardware table
_PROCESS_BYTES = 0.8 * GIB_BYTES  # of a process with torch and vLLM, before it has a model
# of each parameter, at the most: what is loaded, published or in a snapshot. A trainer of all weights keeps
# 24 bytes besides; both are the 8.6 times its weights in float32 of docs/benchmarks.md
_COPIES_BYTES = 2.6 * 4
_PUBLISHED = 3  # copies of what is published that rank 0 has at the most, beside GPUs


def in_gib(size: float) -> str:
    """Write a number of bytes in GiB."""
    return f"{size / GIB_BYTES:.1f} GiB"


def generator_bytes(spec: RunSpec, weights: float) -> float:
    """Return the main memory that a generator takes. `weights`: bytes of the model as it is published."""
    return _PROCESS_BYTES + weights + (kv_cache_bytes(spec, on_gpu=False) or 0.0)


def kv_cache_bytes(spec: RunSpec, *, on_gpu: bool) -> float | None:
    """Return the bytes that a run file bounds a generator's KV cache to; None: it does not."""
    if not isinstance(spec.generator, VllmSettings):
        return None
    mib = spec.generator.gpu_kv_cache_mib if on_gpu else spec.generator.kv_cache_mib
    return None if mib is None else float(mib * (1 << 20))


def trainer_bytes(parameters: float, ranks: int, of_rank: LearnerMemory) -> float:
    """Return the main memory that all ranks of a trainer on CPUs take together."""
    return ranks * (_PROCESS_BYTES + of_rank.most) + parameters * _COPIES_BYTES


def beside_gpus_bytes(published: float, ranks: int, of_rank: LearnerMemory) -> float:
    """Return the main memory that all ranks of a trainer on GPUs take. `published`: bytes of a version."""
    return ranks * (_PROCESS_BYTES + of_rank.moments) + _PUBLISHED * published

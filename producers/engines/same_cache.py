"""Compares the KV caches of an engine's ranks while it starts.

Each rank has a scheduler of its own. All must see a cache of as many blocks, or they would preempt other
samples than each other, and wait for ever in the next sum.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from producers.engines.engine import EngineError, lasting_error


def check_same_cache(config: Any) -> None:
    """Raise EngineError unless the KV caches of all ranks have the same number of equal blocks."""
    from vllm.distributed.parallel_state import get_world_group

    sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    own = torch.tensor(
        [config.num_blocks, len(sizes), min(sizes, default=0), max(sizes, default=0), _kinds(config)]
    )
    least, most = own.clone(), own.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=get_world_group().cpu_group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=get_world_group().cpu_group)
    if not torch.equal(least, most):
        raise _differs(least.tolist(), most.tolist())


def _kinds(config: Any) -> int:
    """Return a number that says which kinds of caches there are: a window frees blocks, and others don't."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    kinds = [
        (type(one).__name__, getattr(one, "sliding_window", 0), getattr(one, "attention_chunk_size", 0))
        for one in specs
    ]
    return zlib.crc32(repr(sorted(map(str, kinds))).encode())


def _differs(least: list[int], most: list[int]) -> EngineError:
    return lasting_error(
        "the ranks of the engine would have KV caches of different shapes (blocks, groups, tokens of a "
        f"block, and kinds: from {least} to {most}), since their layers are not of the same kinds, or their "
        "GPUs are not. If it is the layers, set generator.pipeline_parallel: 1"
    )

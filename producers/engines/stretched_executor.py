"""vLLM's executor of one rank of an engine that holds a stretch of a model's layers.

Each rank has a scheduler of its own. All must see a KV cache of as many blocks, or they would preempt other
samples: so the rank with the most layers for its memory decides.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from producers.engines.engine import EngineError
from producers.engines.stretch_links import StretchLinks


def stretched_executor() -> type[Any]:
    """Return the class, once vLLM may be imported."""
    from vllm.distributed.parallel_state import get_pp_group, get_world_group
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class StretchedExecutor(ExecutorWithExternalLauncher):
        """Runs a stretch of layers in this process, and draws what all other ranks draw."""

        supports_pp = True

        def _init_executor(self) -> None:
            super()._init_executor()
            StretchLinks(get_pp_group()).use()
            runner = self.driver_worker.worker.model_runner
            runner.broadcast_pp_output = True
            if not get_pp_group().is_first_rank:  # vLLM makes these in a warm-up, which on CPUs is left out
                runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                    batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
                )

        def determine_available_memory(self) -> list[int]:
            """Return as much as the blocks take for which all ranks have room."""
            (memory,) = super().determine_available_memory()
            layers = max(1, len(self.get_kv_cache_specs()[0]))
            each = torch.tensor(memory // layers)
            dist.all_reduce(each, op=dist.ReduceOp.MIN, group=get_world_group().cpu_group)
            return [int(each) * layers]

    return StretchedExecutor


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
    refused = EngineError(
        "the ranks of the engine would have KV caches of different shapes (blocks, groups, tokens of a "
        f"block, and kinds: from {least} to {most}), since their layers are not of the same kinds, or their "
        "GPUs are not. If it is the layers, set generator.pipeline_parallel: 1"
    )
    refused.lasting = True
    return refused

"""vLLM's executor of one rank of an engine that holds a stretch of a model's layers.

All ranks must see a KV cache of as many blocks (`same_cache.py`): so the rank with the most layers for its
memory decides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

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

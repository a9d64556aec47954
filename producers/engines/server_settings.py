"""Reads the facts about a server of vLLM: from its settings, and from the model that it has loaded."""

from __future__ import annotations

from typing import Any

import torch
import vllm

from producers.engines.engine import EngineError
from producers.engines.plain_experts import check_experts
from producers.engines.server_facts import CONTRACT, ServerFacts, this_machine


def read_facts(config: Any, runner: Any, *, transfers: bool) -> ServerFacts:
    """Return the facts. `config`: vLLM's; `transfers`: whether the worker takes patches of weights."""
    model, scheduler = config.model_config, config.scheduler_config
    return ServerFacts(
        contract=CONTRACT, machine=this_machine(), vllm=vllm.__version__,
        device=str(runner.device.type),
        dtype=str(model.dtype).removeprefix("torch."),
        front_ends=getattr(config.parallel_config, "_api_process_count", 1),
        workers=config.parallel_config.world_size_across_dp,
        ranks=config.parallel_config.tensor_parallel_size,
        whole_experts=bool(config.parallel_config.enable_expert_parallel),
        vocabulary=model.get_vocab_size(), longest=model.max_model_len, slots=scheduler.max_num_seqs,
        logprobs_mode=str(model.logprobs_mode),
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        chunked_prefill=bool(scheduler.enable_chunked_prefill), priorities=scheduler.policy == "priority",
        quantization=str(model.quantization or ""), adapters=config.lora_config is not None,
        speculation=config.speculative_config is not None,
        transfers=transfers, counts_tokens=isinstance(getattr(runner, "requests", None), dict),
        cache_dtype=str(config.cache_config.cache_dtype), offloads=_offloads(config.offload_config),
        unfit_experts=_unfit_experts(runner.get_model()),
        config={name: one for name, one in model.hf_config.to_dict().items() if _is_plain(one)},
    )  # fmt: skip


def _offloads(config: Any) -> bool:
    """Whether weights lie in main memory. Each of these two switches on one of vLLM's ways to do that."""
    return bool(config.uva.cpu_offload_gb > 0 or config.prefetch.offload_group_size > 0)


def _unfit_experts(model: torch.nn.Module) -> str:
    """Return why a mixture's experts can't be verified; empty: they can, or the model has none.

    The model is asked and not a setting: by itself vLLM takes Triton on some GPUs, and others elsewhere.
    """
    try:
        check_experts(model)
    except EngineError as error:
        return str(error)
    return ""


def _is_plain(value: object) -> bool:
    """Whether JSON can have a value: configs also hold types of torch."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)

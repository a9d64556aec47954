"""Further arguments of vLLM that a run file may set, and those that it may not, each with the reason."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any

from producers.engines.engine import lasting_error
from schemas.shortening import shown

VllmOption = bool | int | float | str

_WEIGHTS = "the trainer's weights are written into vLLM's own, as StreamRL lays them out"
_SETTINGS = {
    **dict.fromkeys(("model", "model_weights", "tokenizer"), "model.path"), "dtype": "model.dtype",
    "max_num_seqs": "generator.slots", "max_model_len": "sampling.max_prompt_tokens and sampling.max_tokens",
    "gpu_memory_utilization": "generator.gpu_memory",
    "kv_cache_memory_bytes": "generator.kv_cache_mib, and on GPUs by generator.gpu_kv_cache_mib",
    "enable_sleep_mode": "placement.kind", "speculative_config": "generator.speculation",
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "generator.speculation"),
    "enable_lora": "model.lora", "tensor_parallel_size": "generator.tensor_parallel",
    "pipeline_parallel_size": "generator.pipeline_parallel",
    "enable_expert_parallel": "generator.expert_parallel",
    "enable_prefix_caching": "generator.prefix_caching",
    "quantization": "generator.quantization", "quantization_config": "generator.quantization",
}  # fmt: skip
_REASONS = {
    **{name: f"that is said by {setting}" for name, setting in _SETTINGS.items()},
    **dict.fromkeys(("runner", "convert"), "an engine draws answers, and nothing else"),
    **dict.fromkeys(
        ("data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_start_rank",
         "data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend",
         "data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb"),
        "an engine has one copy of the model; say placement.generators for more",
    ),
    **dict.fromkeys(
        ("enable_dbo", "ubatch_size"),
        "vLLM splits steps only among copies of a model that compute together, and an engine has one copy",
    ),
    "enable_batch_sharded_sampling": "each rank of an engine draws all samples, and compares them with the "
    "other ranks'",
    "distributed_executor_backend": "StreamRL starts the ranks of an engine; see generator.tensor_parallel "
    "and placement.engine_ranks",
    "device_ids": "each rank of an engine takes the GPU that StreamRL deals out to it",
    **dict.fromkeys(
        ("nnodes", "node_rank", "master_addr"), "ranks of other machines are said by placement.engine_ranks"
    ),
    **dict.fromkeys(
        ("prefill_context_parallel_size", "decode_context_parallel_size"),
        "ranks divide tensors, experts and layers, and each has the keys and values of its heads and layers",
    ),
    **dict.fromkeys(
        ("offload_backend", "cpu_offload_gb", "offload_group_size"),
        "weights lie where the engine computes, since new ones are written and hashed in place",
    ),
    **dict.fromkeys(
        ("load_format", "model_loader_extra_config", "worker_cls", "worker_extension_cls",
         "weight_transfer_config"),
        _WEIGHTS,
    ),
    "disable_log_stats": "StreamRL counts an engine's steps and tokens by itself",
    "seed": "each sample has a seed of its own",
    "scheduler_cls": "StreamRL steers vLLM's own scheduler",
    "scheduling_policy": "the samples with most left to draw go first",
    "async_scheduling": "it is on wherever samples are drawn by a GPU and without speculation",
    "trust_remote_code": "code in a model's folder is never run",
    "skip_tokenizer_init": "answers are stopped by their text",
    "kv_cache_dtype": "keys and values are held as the model computes them, as the trainer has them",
    "kv_offloading_size": "keys and values stay where the engine computes, where new weights drop those of "
    "older ones",
    "logprobs_mode": "a sample has the logprobs that it was drawn with",
    "moe_backend": "experts are computed where their weights lie as they were loaded",
    "expert_placement_strategy": "each rank has neighbouring experts, whose digests the generator expects",
    "enable_eplb": "experts stay where they were loaded, since their weights are written in place",
    "enable_return_routed_experts": "that is said by model.follow_routes",
}  # fmt: skip


def check_options(options: Mapping[str, VllmOption]) -> Mapping[str, VllmOption]:
    """Return the options. Raise ValueError for one that StreamRL sets by itself."""
    for name in options:
        if name in _REASONS:
            raise ValueError(f"{name} can't be set: {_REASONS[name]}")
    return options


def merged_arguments(
    own: dict[str, Any], options: Mapping[str, VllmOption], known: type[Any]
) -> dict[str, Any]:
    """Return our arguments and those of the run file. Raise EngineError for one that vLLM does not know.

    `known`: vLLM's class of arguments.
    """
    names = [field.name for field in dataclasses.fields(known)]
    for name in options:
        if name not in names:
            raise lasting_error(unknown_option(name, names))
    return own | dict(options)


def unknown_option(name: str, known: Collection[str]) -> str:
    """Say that vLLM has no argument of this name, and name those like it."""
    close = difflib.get_close_matches(name, known, n=3)
    return f"generator.options.{shown(name)}: the vLLM that is installed knows no such argument" + (
        f"; there are {', '.join(close)}" if close else ""
    )

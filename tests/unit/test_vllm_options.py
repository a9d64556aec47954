"""Arguments of vLLM in a run file: those that StreamRL sets are refused, and unknown and unfit ones, too."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from flows.run.checks import problems_of
from flows.run.inspection import engine_arguments
from flows.run.inspection.engine_arguments import wrong_options
from producers.engines.engine import EngineError
from producers.engines.vllm_engine import VllmSettings
from producers.engines.vllm_options import VllmOption, merged_arguments
from tests.factories import make_spec


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dtype", "that is said by model.dtype"), ("max_num_seqs", "that is said by generator.slots"),
        ("tensor_parallel_size", "that is said by generator.tensor_parallel"),
        ("pipeline_parallel_size", "that is said by generator.pipeline_parallel"),
        ("enable_expert_parallel", "that is said by generator.expert_parallel"),
        ("data_parallel_size", "an engine has one copy"), ("data_parallel_rank", "an engine has one copy"),
        ("data_parallel_backend", "an engine has one copy"),
        ("enable_dbo", "an engine has one copy"), ("ubatch_size", "an engine has one copy"),
        ("enable_batch_sharded_sampling", "each rank of an engine draws all samples"),
        ("runner", "draws answers"), ("convert", "draws answers"),
        ("model_weights", "that is said by model.path"), ("scheduler_cls", "vLLM's own scheduler"),
        ("worker_extension_cls", "weights are written into"),
        ("weight_transfer_config", "weights are written into"),
        ("kv_offloading_size", "stay where the engine computes"),
        ("distributed_executor_backend", "starts the ranks"),
        ("device_ids", "the GPU that StreamRL deals out"),
        ("nnodes", "placement.engine_ranks"), ("cpu_offload_gb", "written and hashed in place"),
        ("decode_context_parallel_size", "ranks divide tensors"),
        ("quantization", "that is said by generator.quantization"),
        ("load_format", "weights are written into"), ("kv_cache_dtype", "as the trainer has them"),
        ("disable_log_stats", "counts an engine's steps"), ("seed", "a seed of its own"),
        ("trust_remote_code", "is never run"),
        ("enable_prefix_caching", "that is said by generator.prefix_caching"),
    ],
)  # fmt: skip
def test_what_streamrl_sets_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ValidationError, match=rf"generator\.options[\s\S]*{name} can't be set: .*{why}"):
        make_spec(generator={"options": {name: 1}})


def test_only_plain_values_are_options() -> None:
    spec = make_spec(generator={"options": {"max_num_batched_tokens": 512, "block_size": 32, "x": True}})
    assert isinstance(spec.generator, VllmSettings)
    assert spec.generator.options == {"max_num_batched_tokens": 512, "block_size": 32, "x": True}
    with pytest.raises(ValidationError, match="options"):
        make_spec(generator={"options": {"hf_overrides": {"a": 1}}})


@dataclass
class Known:
    """Arguments of an engine."""

    model: str = ""
    max_num_batched_tokens: int = 0
    block_size: int = 16


def test_an_argument_that_vllm_does_not_know_is_named_with_those_like_it() -> None:
    own = {"model": "m", "max_num_batched_tokens": 2048}
    assert merged_arguments(own, {"max_num_batched_tokens": 512}, Known) == {
        **own,
        "max_num_batched_tokens": 512,
    }
    with pytest.raises(EngineError, match=r"generator.options.'block_sise'.*there are block_size") as raised:
        merged_arguments(own, {"block_sise": 8}, Known)
    assert raised.value.lasting, "the next start meets it, too"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (
            "block_sise",
            8,
            r"'block_sise': the vLLM that is installed knows no such argument; there are block",
        ),
        ("max_num_batched_tokens", "many", r"it is 'many'; vLLM takes a whole number$"),
        ("max_num_batched_tokens", True, r"it is True; vLLM takes a whole number$"),
        ("max_num_batched_tokens", 512.5, r"it is 512\.5; vLLM takes a whole number$"),
        ("enforce_eager", 1, r"it is 1; vLLM takes true or false$"),
        ("watermark", "low", r"it is 'low'; vLLM takes a number$"),
        ("hf_token", 1, r"it is 1; vLLM takes true or false or a string$"),  # bool | str | None
        ("performance_mode", 3, r"it is 3; vLLM takes a string$"),  # an alias of another module
        ("cudagraph_capture_sizes", 8, r"it is 8; vLLM takes no plain value$"),
        ("attention_backend", "FLASH_ATN", r"it is 'FLASH_ATN'; vLLM takes FLASH_ATTN, .* and others$"),
        ("attention_backend", 3, r"it is 3; vLLM takes a string$"),
        ("optimization_level", 9, r"it is 9; vLLM takes 0, 1, 2 or 3$"),
        ("performance_mode", "fast", r"it is 'fast'; vLLM takes balanced, interactivity or throughput$"),
        ("watermark", 1.0, r"it is 1\.0; vLLM takes at least 0 and less than 1$"),
        ("stream_interval", 0, r"it is 0; vLLM takes at least 1$"),
        ("block_size", -1, r"it is -1; vLLM takes more than 0$"),  # its default does not name a setting
        ("max_num_batched_tokens", -5, r"it is -5; vLLM takes at least 1$"),
        ("max_num_batched_tokens", 63, r"it is 63, .* set it to 64 or more, or lower generator\.slots$"),
    ],
)
def test_what_vllm_would_refuse_is_told_before_the_start(name: str, value: VllmOption, why: str) -> None:
    spec = make_spec(generator={"options": {name: value}, "slots": 64})
    (problem,) = [one for one in problems_of(spec) if "generator.options" in one]
    assert problem.startswith("generator.options.") and re.search(why, problem)


def test_a_run_that_draws_nothing_needs_no_engine() -> None:
    offline = {"algorithm": {"mode": "offline", "recorded": "count-1"}, "loss": {"kind": "grpo"}}
    unknown = {"options": {"block_sise": 8}}
    assert not [one for one in problems_of(make_spec(**offline, generator=unknown)) if "block_sise" in one]
    evaluated = make_spec(**offline, generator=unknown, evaluation={"problems": 8})
    assert [one for one in problems_of(evaluated) if "block_sise" in one]


FINE: dict[str, VllmOption] = {
    "max_num_batched_tokens": 64, "watermark": 0, "hf_token": "x", "performance_mode": "throughput",
    "block_size": 32, "enforce_eager": True,
    "optimization_level": 2, "attention_backend": "triton_attn", "linear_backend": "deep-gemm",
    "mamba_backend": "auto", "tokenizer_mode": "my_own", "max_logprobs": -1,
}  # fmt: skip


def test_nothing_is_said_of_what_is_fine_or_cannot_be_told() -> None:
    assert wrong_options(FINE, 64) == []
    assert wrong_options({}, 64) == []


@pytest.mark.parametrize("code", ["", "class EngineArgs(Others):\n    model: str = ''", "class Args: ..."])
def test_nothing_is_said_where_vllm_or_its_arguments_are_not_found(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(engine_arguments, "source_of", lambda package, file: ast.parse(code))
    assert wrong_options({"block_sise": 8, "max_num_batched_tokens": 8}, 64) == []

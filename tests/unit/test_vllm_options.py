"""Arguments of vLLM in a run file: those that StreamRL sets are refused, unknown ones at the start."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from producers.engines.engine import EngineError
from producers.engines.vllm_engine import VllmSettings
from producers.engines.vllm_options import merged_arguments
from tests.factories import make_spec


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dtype", "that is said by model.dtype"), ("max_num_seqs", "that is said by generator.slots"),
        ("tensor_parallel_size", "that is said by generator.tensor_parallel"),
        ("pipeline_parallel_size", "that is said by generator.pipeline_parallel"),
        ("enable_expert_parallel", "that is said by generator.expert_parallel"),
        ("data_parallel_size", "an engine has one copy"),
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
    with pytest.raises(EngineError, match=r"generator.options.'block_sise'.*there are block_size"):
        merged_arguments(own, {"block_sise": 8}, Known)

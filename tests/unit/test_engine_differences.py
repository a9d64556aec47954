"""Configs that vLLM computes otherwise than the trainer are refused by the config alone; others are not."""

from __future__ import annotations

from typing import Any

import pytest

from flows.run.inspection.architectures import engine_code
from flows.run.inspection.engine_differences import why_computed_otherwise
from flows.run.inspection.supported_models import why_not_trained

WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "num_hidden_layers": 2}
MIXED = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob is True, and of a olmoe vLLM does not norm"),
        ("olmoe", {"clip_qkv": 0.5}, "clip_qkv is 0.5"),
        ("olmo", {"clip_qkv": 0.5}, ""),
        ("olmoe", {"norm_topk_prob": False, "clip_qkv": None}, ""),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"attention_bias": True}, ""),
        ("ernie4_5", {"use_bias": True}, "use_bias is True"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias is False"),
        ("qwen2_moe", {"qkv_bias": True}, ""),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 64}}, "on GPUs alone"),
        ("qwen2", {**WINDOWS, "max_window_layers": 1}, "only some layers have a window"),
        ("qwen2", {**WINDOWS, "max_window_layers": 2}, ""),  # no layer has one
        ("qwen2", {**WINDOWS, "max_window_layers": 0}, ""),  # all have it
        ("qwen2", {**WINDOWS, "max_window_layers": 1, "use_sliding_window": False}, ""),
        ("qwen2", {**WINDOWS, "max_window_layers": "one"}, ""),  # it is refused otherwise
        ("qwen3", {**WINDOWS, "layer_types": MIXED}, "only some layers have a window"),
        ("qwen2_moe", {**WINDOWS, "max_window_layers": 2}, "nobody computes windows"),
        ("gemma3_text", {"sliding_window": 16, "layer_types": MIXED}, ""),
        ("llama", {"sliding_window": 16, "layer_types": MIXED}, "remove layer_types"),
        ("mistral", {"sliding_window": 16}, ""),
        (None, {"clip_qkv": 0.5}, ""),
    ],
)
def test_a_difference_is_said(kind: str | None, config: dict[str, Any], expected: str) -> None:
    found = why_computed_otherwise({"model_type": kind, **config}, on_cpu=True)
    assert expected in found and bool(expected) == bool(found)


def test_another_activation_is_refused_where_vllm_has_one_alone() -> None:
    pytest.importorskip("vllm.version")
    assert "Only silu" in engine_code("LlamaForCausalLM") and not engine_code("NoSuchModel")
    gelu = {"hidden_act": "gelu"}
    assert "silu alone" in why_computed_otherwise({"model_type": "llama", **gelu}, on_cpu=True)
    assert not why_computed_otherwise({"model_type": "gemma", **gelu}, on_cpu=True)
    assert not why_computed_otherwise({"model_type": "llama", "hidden_act": "silu"}, on_cpu=True)


def test_chunks_of_two_kinds_are_for_gpus() -> None:
    asked = {"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 64}}
    assert not why_computed_otherwise(asked, on_cpu=False)


def test_tokens_that_look_at_later_ones_are_refused() -> None:
    config = {"model_type": "gemma3_text", "use_bidirectional_attention": True}
    assert "look at later ones" in why_not_trained(config)

"""Counts of models against those that are published, and against transformers' own modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from flows.planning.model_shape import FAMILIES, ShapeError, shape_of, weight_bytes
from tests.bench._paper_figures import CONFIGS as QWEN
from tests.bench._silicon_models import CONFIGS as SERVED

SMALL: dict[str, Any] = {
    "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "vocab_size": 320, "intermediate_size": 160, "head_dim": 16, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, dict[str, int]] = {
    "mixtral": {"num_local_experts": 8}, "minimax_m2": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8}, "olmoe": {"num_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 48},
    "qwen2_moe": {
        "num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (QWEN["7B"], 7.62), (QWEN["32B"], 32.76), (QWEN["72B"], 72.71),
        (SERVED["meta-llama/Llama-3.1-8B-Instruct"], 8.03), (SERVED["meta-llama/Llama-3.1-70B"], 70.55),
        (SERVED["Qwen/Qwen3-32B"], 32.76), (SERVED["Qwen/Qwen3-235B-A22B-FP8"], 235.09),
        (SERVED["openai/gpt-oss-120b"], 116.83),
    ],
)  # fmt: skip
def test_parameters_are_those_published(config: dict[str, Any], billions: float) -> None:
    assert shape_of(config).parameters / 1e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.parametrize(
    ("model", "billions"), [("Qwen/Qwen3-235B-A22B-FP8", 21.5), ("openai/gpt-oss-120b", 5.1)]
)
def test_active_parameters_are_about_those_published(model: str, billions: float) -> None:
    assert shape_of(SERVED[model]).active_parameters / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
def test_each_family_counts_as_transformers_builds_it(kind: str, tied: bool) -> None:
    experts = EXPERTS.get(kind, {})
    more = {"num_experts_per_tok": 2, **experts} if experts else {}
    config = AutoConfig.for_model(kind, **{**SMALL, **more, "tie_word_embeddings": tied})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape_of(config.to_dict()).parameters == sum(one.numel() for one in model.parameters())


def test_grouped_heads_keep_fewer_bytes() -> None:
    shape = shape_of(QWEN["72B"])
    assert shape.kv_bytes() == 2 * 80 * 8 * 128 * 2
    assert weight_bytes(shape) == 2 * shape.parameters


@given(st.floats(0, 1e5), st.floats(0, 1e5))
def test_more_context_never_takes_fewer_flops(one: float, other: float) -> None:
    for config in (QWEN["7B"], SERVED["openai/gpt-oss-120b"]):
        shape = shape_of(config)
        assert shape.flops(min(one, other)) <= shape.flops(max(one, other))


def test_a_window_bounds_what_is_attended() -> None:
    shape = shape_of(SERVED["openai/gpt-oss-120b"])
    assert shape.attended(128) == 128
    assert shape.attended(10_128) == (10_128 + 128) / 2


@given(st.floats(1, 1e6))
def test_no_more_experts_are_touched_than_there_are(tokens: float) -> None:
    shape = shape_of(SERVED["Qwen/Qwen3-235B-A22B-FP8"])
    assert 8 / 128 - 1e-9 <= shape.experts_touched(tokens) <= 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"layer_types": ["linear_attention"]}, "linear attention"),
        ({"model_type": "mamba"}, "'mamba'"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_attention_heads": 1 << 40}, "num_attention_heads"),
    ],
)
def test_impossible_configs_are_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        shape_of({**QWEN["7B"], **change})


def test_a_token_takes_no_more_experts_than_there_are() -> None:
    with pytest.raises(ShapeError, match="takes 9 experts"):
        shape_of({**SERVED["openai/gpt-oss-120b"], "num_local_experts": 8, "num_experts_per_tok": 9})


def test_a_folder_is_read(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="can't be read"):
        shape_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ShapeError, match="no JSON"):
        shape_of(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ShapeError, match="no JSON object"):
        shape_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN["7B"]))
    assert shape_of(tmp_path).parameters == shape_of(QWEN["7B"]).parameters

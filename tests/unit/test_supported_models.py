"""Which kinds of models are supported: the tables are true, and a config alone is enough to say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from consumers.batches import packing
from consumers.batches.packing import UnsupportedAttention
from consumers.learners.forward import UnsupportedModel, _as_it_is, _check
from flows.run.inspection import supported_models
from flows.run.inspection.architectures import generated, trained
from flows.run.inspection.model import look_at_model
from flows.run.inspection.supported_models import REFUSED, TRIED, head_size, head_sizes, why_not_trained
from tests.factories import make_model_files

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
SLOW = {"falcon_h1", "granitemoehybrid", "kimi_linear"}  # seconds each, in their first pass


def as_the_trainer_looks(kind: str) -> None:
    """Compare logits as the trainer does when it loads a model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config: Any = None
    for without in ((), ("head_dim",)):
        try:
            config = AutoConfig.for_model(kind, **{k: v for k, v in SMALL.items() if k not in without})
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            break
        except (AttributeError, TypeError, ValueError):
            continue
    expected = _as_it_is(model)
    packing.use_packed_attention(model)
    _check(model, expected, "model")


@pytest.mark.parametrize("kind", TRIED)
def test_kinds_that_are_tried_can_be_trained_and_generated(kind: str) -> None:
    as_the_trainer_looks(kind)
    assert not generated() or trained()[kind] in generated()
    assert why_not_trained({"model_type": kind}) == ""


@pytest.mark.parametrize("kind", sorted(set(REFUSED) - SLOW))
def test_kinds_that_are_refused_can_not_be_trained(kind: str) -> None:
    with pytest.raises((UnsupportedModel, UnsupportedAttention)):
        as_the_trainer_looks(kind)
    assert why_not_trained({"model_type": kind}).endswith(REFUSED[kind])


def said_of(folder: Path, **config: Any) -> list[str]:
    model = make_model_files(folder)
    (model / "config.json").write_text(json.dumps(config))
    return [one.said for one in look_at_model(model) if one.wrong]


def test_gpt_neox_is_named_with_where_its_layers_are(tmp_path: Path) -> None:
    (said,) = said_of(tmp_path, model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"])
    assert said == (
        f"{tmp_path}/config.json: the trainer can't train model_type 'gpt_neox': it needs the layers at "
        "`model` and the head at `lm_head`, and GPTNeoXForCausalLM has no `model` (it has `gpt_neox`, "
        "`lm_head`)"
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2"}, "GPT2LMHeadModel has no `model` (it has `lm_head`, `transformer`)"),
        ({"model_type": "gpt_oss"}, "can't train model_type 'gpt_oss': its attention has sinks"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "the config scales logits (logits_scaling: 8.0)"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30}, "the config caps logits (final_logit"),
    ],
)
def test_what_the_trainer_refuses_is_said_by_the_config(
    config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    (said,) = said_of(tmp_path, **config)
    assert expected in said


def test_an_odd_size_of_heads_is_named_with_the_sizes_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supported_models, "head_sizes", lambda: (32, 64))
    monkeypatch.setenv("STREAMRL_DEVICE", "cpu")
    heads = {"hidden_size": 80, "num_attention_heads": 2}
    (said,) = said_of(tmp_path, model_type="qwen2", **heads)
    assert said.endswith(
        "its attention heads have size 40 (head_dim, else hidden_size / num_attention_heads), and on CPUs "
        "vLLM knows heads of size 32, 64 alone"
    )
    assert not said_of(tmp_path, model_type="qwen2", **heads, head_dim=64)
    monkeypatch.delenv("STREAMRL_DEVICE")
    monkeypatch.setattr(supported_models, "visible_gpus", lambda: ["0"])
    assert not said_of(tmp_path, model_type="qwen2", **heads)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"head_dim": 128, "hidden_size": 64, "num_attention_heads": 2}, 128),
        ({"hidden_size": 64, "num_attention_heads": 2}, 32),
        ({"hidden_size": 64, "num_attention_heads": 0}, None),
        ({"hidden_size": "64", "num_attention_heads": True}, None),
        ({"head_dim": 64, "kv_lora_rank": 512}, None),
        ({}, None),
    ],
)
def test_the_size_of_heads(config: dict[str, Any], size: int | None) -> None:
    assert head_size(config) == size


def test_the_table_of_the_installed_vllm_is_found() -> None:
    pytest.importorskip("vllm.version")
    assert {32, 64, 128} <= set(head_sizes()) and 40 not in head_sizes()


def test_a_kind_that_nobody_has_tried_is_said_and_not_refused(tmp_path: Path) -> None:
    model = make_model_files(tmp_path)
    (model / "config.json").write_text(json.dumps({"model_type": "mellum"}))
    (found,) = look_at_model(model)
    assert not found.wrong and found.noted
    assert found.said.endswith("; nobody has tried to train this kind of model yet")

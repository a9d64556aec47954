"""What is checked before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.run.checks import check_context
from schemas.loading import RunFileError
from tests.factories import make_model_files, make_spec, make_tiny_mixture, make_tiny_model


def test_a_model_too_small_for_the_longest_sample_is_refused(tmp_path: Path) -> None:
    make_model_files(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 24}))
    check_context(make_spec(sampling={"max_tokens": 16, "max_prompt_tokens": 8}), tmp_path)
    with pytest.raises(RunFileError, match=r"= 25, but the model in .* holds 24 tokens"):
        check_context(make_spec(sampling={"max_tokens": 16, "max_prompt_tokens": 9}), tmp_path)


def test_a_config_without_a_length_has_that_of_its_kind(tmp_path: Path) -> None:
    """Which transformers and vLLM take; with `rope_type: dynamic` a longer sample would change others."""

    def look(config: dict[str, object], longest: int) -> None:
        sampling = {"max_tokens": longest - 8, "max_prompt_tokens": 8}
        (tmp_path / "config.json").write_text(json.dumps(config))
        check_context(make_spec(sampling=sampling, trainer={"microbatch_tokens": longest}), tmp_path)

    make_model_files(tmp_path)
    look({"model_type": "llama"}, 2048)
    with pytest.raises(RunFileError, match=r"= 2049, but the model in .* holds 2048 tokens"):
        look({"model_type": "llama"}, 2049)
    for unknown in ({}, {"model_type": "of_tomorrow"}, {"model_type": 3}):
        look(unknown, 9000)


def test_layers_to_adapt_are_looked_for_in_the_models_files(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")

    def look(folder: Path, lora: dict[str, object]) -> None:
        check_context(make_spec(model={"lora": lora}), folder)

    look(model, {"rank": 4})
    look(model, {"targets": ["q_proj", "down_proj"]})
    with pytest.raises(RunFileError, match="no linear layer 'qproj' below its head; did you mean 'q_proj'"):
        look(model, {"targets": ["qproj"]})
    with pytest.raises(RunFileError, match=r"'embed_tokens' below its head \(it has: down_proj, "):
        look(model, {"targets": ["embed_tokens"]})


@pytest.mark.parametrize("target", ["up_proj", "gate"])
def test_experts_and_routers_get_no_adapter(tmp_path: Path, target: str) -> None:
    """In a mixture each layer of which has experts."""
    model = make_tiny_mixture(tmp_path / "model", "qwen3_moe")
    check_context(make_spec(model={"lora": {"targets": ["q_proj"]}}), model)
    with pytest.raises(RunFileError, match=rf"no linear layer '{target}' below its head"):
        check_context(make_spec(model={"lora": {"targets": ["q_proj", target]}}), model)


@pytest.mark.parametrize("lora", [None, {}])
def test_a_model_without_safetensors_is_refused(tmp_path: Path, lora: dict[str, object] | None) -> None:
    """Its weights may be there as a file that would have to be unpickled."""
    model = make_model_files(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(RunFileError, match=r"model has no model\.safetensors: save the model with save_pre"):
        check_context(make_spec(model={"lora": lora}), model)


def test_an_adapter_needs_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunFileError, match=r"model\.lora: peft is not installed: pip install"):
        check_context(make_spec(model={"lora": {}}), model)


def test_a_model_that_ranks_of_an_engine_can_not_divide_is_refused_before_the_start(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    check_context(make_spec(generator={"tensor_parallel": 2}), model)
    with pytest.raises(RunFileError, match=r"generator\.tensor_parallel: .*2 attention heads can't be"):
        check_context(make_spec(generator={"tensor_parallel": 4}), model)
    check_context(make_spec(generator={"pipeline_parallel": 2}), model)
    with pytest.raises(RunFileError, match=r"generator\.pipeline_parallel: its 2 layers .* 3 stretches"):
        check_context(make_spec(generator={"pipeline_parallel": 3}), model)
    with pytest.raises(RunFileError, match=r"generator\.expert_parallel: it is no mixture of experts"):
        check_context(make_spec(generator={"tensor_parallel": 2, "expert_parallel": True}), model)
    mixture = make_tiny_mixture(tmp_path / "mixture", "qwen3_moe")
    check_context(make_spec(generator={"tensor_parallel": 2, "expert_parallel": True}), mixture)
    (model / "config.json").write_text("{}")
    with pytest.raises(RunFileError, match=r"generator\.tensor_parallel: .*does not say how many attention"):
        check_context(make_spec(generator={"tensor_parallel": 2}), model)
    check_context(make_spec(), model)


def test_a_model_that_vllm_has_in_bfloat16_needs_that_type(tmp_path: Path) -> None:
    model = make_model_files(tmp_path)
    (model / "config.json").write_text(json.dumps({"model_type": "apertus"}))
    with pytest.raises(RunFileError, match=r"model.dtype: it is float32, and vLLM has parts of a apertus in"):
        check_context(make_spec(), model)
    check_context(make_spec(model={"dtype": "bfloat16"}), model)

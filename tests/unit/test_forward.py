"""Which models are trained as they are meant, and which are refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks

from consumers.batches.packing import UnsupportedAttention
from consumers.learners.forward import Forward, UnsupportedModel, adapt, call_head_once, load_policy
from consumers.learners.sharded_loading import parameter_names, without_weights
from consumers.learners.weight_rows import WeightRows
from tests.factories import make_spec
from tests.training import batches_of, rows_of

SIZES = {
    "vocab_size": 24, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
CPU = torch.device("cpu")


def saved(folder: Path, kind: str, **config: Any) -> str:
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**SIZES | config)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    getattr(transformers, kind + head)(made).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "config"),
    [("Qwen2", {}), ("Qwen3", {}), ("Llama", {}), ("Mistral", {"sliding_window": 4}), ("Phi3", {})],
)
def test_models_that_are_trained(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    load_policy(saved(tmp_path, kind, **config), make_spec(), CPU)


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("Granite", {"logits_scaling": 8.0}, "runs its layers and its head over packed sequences, and"),
        ("Cohere", {"logit_scale": 0.25}, "runs its layers and its head over packed sequences, and"),
        (
            "Gemma2",
            {"final_logit_softcapping": 0.01, "attn_logit_softcapping": None},
            "comes to logits that differ",
        ),
        ("GPT2", {"n_embd": 32, "n_head": 2, "n_layer": 1}, "its layers must be at `model`"),
    ],
)
def test_models_that_would_be_trained_wrongly(
    tmp_path: Path, kind: str, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"model\.path {tmp_path}: {kind}.* {reason}"):
        load_policy(saved(tmp_path, kind, **config), make_spec(), CPU)


@pytest.mark.parametrize(("kind", "config"), [("Qwen2", {}), ("Granite", {"logits_scaling": 8.0})])
def test_models_are_compared_without_tf32(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    """With TF32 every model would differ from itself on a GPU. It is back afterwards, also after an error."""
    model = transformers.AutoModelForCausalLM.from_pretrained(saved(tmp_path, kind, **config))
    seen: list[str] = []
    model.lm_head.register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(UnsupportedModel) if config else nullcontext():
            adapt(model, str(tmp_path))
        assert seen == ["highest"] * 3, "each of two sequences as it is, and both packed"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


LOADED: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen2", {"tie_word_embeddings": False, "vocab_size": 300}),
    ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    ("Phi3", {}),
]


@pytest.mark.parametrize(("kind", "config"), LOADED)
def test_a_model_that_is_built_without_weights_is_the_same(
    tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    """Its buffers too, and what is tied; and nothing is drawn from the generator of random numbers."""
    folder, spec, before = saved(tmp_path, kind, **config), make_spec(), torch.get_rng_state()
    model = without_weights(folder, spec, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in model.parameters())
    names, rows = parameter_names(model), WeightRows(folder)
    model._apply(lambda one: torch.empty_like(one, device=CPU) if one.is_meta else one)
    model.tie_weights()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == names.keys()
    with torch.no_grad():
        for name, one in parameters.items():
            for row in range(one.shape[0]):
                one[row] = rows.read(names[name], tuple(one.shape), row, 1)[0]
    expected, run = load_policy(folder, spec, CPU), Forward(spec, CPU)
    for batch in batches_of(spec, rows_of(spec)):
        assert torch.equal(run.logprobs(model, batch), run.logprobs(expected, batch))


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("Granite", {"logits_scaling": 8.0, "vocab_size": 500}, "comes to logits that differ"),
        ("Gemma2", {"final_logit_softcapping": 0.01, "attn_logit_softcapping": None}, "comes to logits that"),
        ("GPT2", {"n_embd": 32, "n_head": 2, "n_layer": 1}, "its layers must be at `model.layers`"),
    ],
)
def test_a_wrong_model_is_found_by_its_first_layers(
    tmp_path: Path, kind: str, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"model\.path {tmp_path}: {kind}.* {reason}"):
        without_weights(saved(tmp_path, kind, **config), make_spec(), CPU)


def test_attention_that_would_be_computed_wrongly(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedAttention, match="softcap"):
        load_policy(saved(tmp_path, "Gemma2", final_logit_softcapping=None), make_spec(), CPU)


def test_entropy_is_that_of_every_eighth_token(tmp_path: Path) -> None:
    spec = make_spec(trainer={"logits_chunk": 8})
    model = load_policy(saved(tmp_path, "Qwen2"), spec, CPU)
    run = Forward(spec, CPU)
    for batch in batches_of(spec, rows_of(spec)):
        run.logprobs(model, batch)
        found, tokens = run.entropy()
        every = model.lm_head(run.states(model, batch)).log_softmax(-1)[::8].detach()
        assert tokens == len(every)
        expected = float(-(every.exp() * every).sum()) / len(every)
        assert found / tokens == pytest.approx(expected, rel=1e-4)
    assert run.entropy() == (0.0, 0)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("OPT", {"dropout": 0.5, "layerdrop": 0.5, "ffn_dim": 32, "word_embed_proj_dim": 32}),
        ("SeedOss", {"residual_dropout": 0.5, "attention_dropout": 0.5}),
        ("Starcoder2", {"residual_dropout": 0.5, "embedding_dropout": 0.5}),
        ("Phi3", {"resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("Mixtral", {"router_jitter_noise": 0.5, "num_local_experts": 4}),
    ],
)
def test_layers_that_are_computed_again_have_no_dropout_and_no_noise(
    tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    folder = saved(tmp_path, kind, **config)
    found = []
    for again in (False, True):
        spec = make_spec(trainer={"gradient_checkpointing": again})
        model, run, saves = load_policy(folder, spec, CPU), Forward(spec, CPU), list[int]()
        batch = batches_of(spec, rows_of(spec))[0]
        with saved_tensors_hooks(
            lambda one, saves=saves: (saves.append(one.numel()), one)[1], lambda one: one
        ):
            logprobs = run.logprobs(model, batch)
        logprobs.sum().backward()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        found.append((logprobs.detach(), gradients, sum(saves)))
    (plain, gradients, kept), (computed_again, same_gradients, fewer) = found
    assert torch.equal(plain, computed_again)
    assert all(map(torch.equal, gradients, same_gradients))
    assert fewer < kept / 2, "the layers keep only what they get"


def test_a_model_that_can_not_compute_its_layers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.Qwen2ForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(UnsupportedModel, match=r"trainer\.gradient_checkpointing: Qwen2ForCausalLM can't"):
        load_policy(saved(tmp_path, "Qwen2"), make_spec(trainer={"gradient_checkpointing": True}), CPU)


def test_a_head_that_is_called_once_computes_the_same(tmp_path: Path) -> None:
    """Whatever the number of chunks: with ZeRO-3 all ranks must call the same modules."""
    spec = make_spec(trainer={"logits_chunk": 4})
    model, run, calls = load_policy(saved(tmp_path, "Qwen2"), spec, CPU), Forward(spec, CPU), list[int]()
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    batch = batches_of(spec, rows_of(spec))[0]

    def computed() -> list[torch.Tensor]:
        calls.clear()
        model.zero_grad()
        logprobs = run.logprobs(model, batch)
        logprobs.sum().backward()
        return [logprobs.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]

    plain = computed()
    assert len(calls) > 1
    call_head_once(model.lm_head)
    assert all(map(torch.equal, plain, computed()))
    assert len(calls) == 1

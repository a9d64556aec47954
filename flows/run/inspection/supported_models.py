"""The kinds of models that a run can train and generate with, told by a model's config alone.

The trainer and the engine look again when they load a model, by comparing numbers. That takes half a minute;
this takes none, and says the same of the models that people have.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeGuard

from flows.run.inspection.architectures import generated, source_of, trained
from flows.run.inspection.engine_differences import why_computed_otherwise
from infra.gpus import visible_gpus
from schemas.shortening import shown

# A test loads a small model of each kind, with random weights, as the trainer does. By model_type.
TRIED = (
    "apertus", "arcee", "ernie4_5", "exaone4", "gemma", "gemma3_text", "glm", "glm4", "hunyuan_v1_dense",
    "llama", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
# Those of them whose samples have routes. Other tests train and generate with each.
MIXTURES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
# Kinds that vLLM knows and the trainer refuses. The same test sees that it does.
_OTHERWISE = "its layers combine tokens otherwise than by attention"
_OWN, _SINKS, _CAPS = (
    "it computes attention by itself",
    "its attention has sinks",
    "its attention caps logits",
)
_SCALES = "it scales its logits"
REFUSED = {
    "bloom": _OWN, "falcon": _OWN, "nemotron": _OWN, "stablelm": _OWN,
    "cohere": _SCALES, "cohere2": _SCALES, "cohere2_moe": _SCALES,
    "deepseek_v4": _SINKS, "gpt_oss": _SINKS, "granite_swa": _SINKS, "granitemoe_swa": _SINKS,
    "gemma2": _CAPS, "vaultgemma": _CAPS,
    "falcon_h1": _OTHERWISE, "granitemoehybrid": _OTHERWISE, "jamba": _OTHERWISE, "kimi_linear": _OTHERWISE,
    "nemotron_h": _OTHERWISE, "olmo_hybrid": _OTHERWISE, "qwen3_5_moe_text": _OTHERWISE,
    "qwen3_5_text": _OTHERWISE, "qwen3_next": _OTHERWISE, "qwen4_exp_text": _OTHERWISE,
}  # fmt: skip
_SCALED = {"logits_scaling": 1.0, "logit_scale": 1.0}  # keys of a config, and the value that changes nothing
_CAPPED = ("final_logit_softcapping", "attn_logit_softcapping")
_PLACES = ("model", "lm_head")  # where the trainer finds a model's layers and its head
_UNLISTED = (48,)  # sizes of heads that vLLM's kernels compute and its table lacks; a test asks the kernels


def elsewhere() -> dict[str, list[str]]:
    """Return the kinds that vLLM knows and whose layers or head are elsewhere, each with the parts it has."""
    known = {kind: name for kind, name in trained().items() if name in generated() and kind not in REFUSED}
    parts = {kind: _parts(kind, name) for kind, name in known.items()}
    return {kind: sorted(found) for kind, found in parts.items() if found and not found >= set(_PLACES)}


def why_not_trained(config: dict[str, Any]) -> str:
    """Return why the trainer can't train a model with this config; empty if nothing speaks against it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in trained():
        return ""  # `wrong_config` says it
    name = trained()[kind]
    if reason := REFUSED.get(kind):
        return f"the trainer can't train model_type {shown(kind)}: {reason}"
    found = _parts(kind, name)
    if found and (lacks := [place for place in _PLACES if place not in found]):
        return (
            f"the trainer can't train model_type {shown(kind)}: it needs the layers at `model` and the head "
            f"at `lm_head`, and {name} has no {' and no '.join(f'`{one}`' for one in lacks)} (it has "
            f"{', '.join(f'`{one}`' for one in sorted(found))})"
        )
    for key, plain in _SCALED.items():
        if config.get(key, plain) not in (plain, None):
            return f"the trainer can't train it: the config scales logits ({key}: {shown(config[key])})"
    if config.get("use_bidirectional_attention"):
        return "the trainer can't train it: with use_bidirectional_attention tokens look at later ones"
    for key in _CAPPED:
        if config.get(key) is not None:
            return f"the trainer can't train it: the config caps logits ({key}: {shown(config[key])})"
    return ""


def why_not_generated(config: dict[str, Any]) -> str:
    """Return why vLLM can't generate with a model as it is trained; empty if nothing speaks against it."""
    if reason := why_computed_otherwise(config, on_cpu=_on_cpu()):
        return reason
    size = head_size(config)
    if size is None or not (sizes := head_sizes()) or size in sizes or not _on_cpu():
        return ""
    allowed = ", ".join(map(str, sizes))
    return (
        f"its attention heads have size {size} (head_dim, else hidden_size / num_attention_heads), and on "
        f"CPUs vLLM knows heads of size {allowed} alone"
    )


def head_size(config: dict[str, Any]) -> int | None:
    """Return the size of a model's attention heads; None if its config does not say, or compresses them."""
    if config.get("kv_lora_rank"):
        return None
    given = config.get("head_dim")
    if given is None:
        width, heads = config.get("hidden_size"), config.get("num_attention_heads")
        given = width // heads if _is_count(width) and _is_count(heads) else None
    return given if _is_count(given) else None


@cache
def head_sizes() -> tuple[int, ...]:
    """Return the sizes of heads that the installed vLLM computes on CPUs. Empty if its table is not found."""
    for node in ast.walk(source_of("vllm", "v1/attention/backends/cpu_attn.py")):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            for inner in ast.walk(node):
                if isinstance(inner, ast.List):
                    values = [one.value for one in inner.elts if isinstance(one, ast.Constant)]
                    return tuple(sorted({*(one for one in values if isinstance(one, int)), *_UNLISTED}))
    return ()


@cache
def _parts(kind: str, name: str) -> frozenset[str]:
    """Return the modules that the constructor of a class of transformers sets. Empty if that is not found."""
    folder = kind.replace("-", "_")
    for node in source_of("transformers", f"models/{folder}/modeling_{folder}.py").body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return frozenset(_modules(node))
    return frozenset()


def _modules(made: ast.ClassDef) -> Iterator[str]:
    """Yield the names of attributes that a class's constructor sets to what it builds, such as layers."""
    for function in made.body:
        if not isinstance(function, ast.FunctionDef) or function.name != "__init__":
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                for target in node.targets:
                    if isinstance(target, ast.Attribute):
                        yield target.attr


def _on_cpu() -> bool:
    return not visible_gpus()


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0

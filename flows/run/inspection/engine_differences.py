"""Configs that vLLM computes otherwise than transformers, which the trainer runs, or refuses as it starts.

Each was seen with vLLM 0.32: by logprobs of an engine beside those of transformers, or by the engine's error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flows.run.inspection.architectures import engine_code, trained
from schemas.shortening import shown


@dataclass(frozen=True)
class _Difference:
    kinds: tuple[str, ...]
    key: str
    wrong: Callable[[Any], object]
    reason: str


_DIFFERENCES = (
    _Difference(("olmoe",), "norm_topk_prob", bool, "vLLM does not norm the shares of experts"),
    _Difference(("olmoe",), "clip_qkv", lambda said: said is not None, "vLLM does not clip attention"),
    _Difference(("olmoe", "qwen3_moe"), "attention_bias", bool, "vLLM has no biases there"),
    _Difference(("ernie4_5",), "use_bias", bool, "vLLM has no biases there"),
    _Difference(("qwen2_moe",), "qkv_bias", lambda said: said is False, "vLLM always has a bias there"),
)
BFLOAT16_ALONE = ("apertus",)  # vLLM has parts of them in bfloat16, whatever `model.dtype` is
_ONE_WINDOW = ("qwen2", "qwen3")  # for all layers, or none
_NO_WINDOW = ("qwen2_moe",)  # neither vLLM nor transformers' layers
_WINDOWS_OF_LAYERS = ("llama", "mistral")  # vLLM looks at `layer_types`, and transformers does not
_SLIDING = "sliding_attention"
_ONLY_SILU = "Only silu is supported"  # in the code of vLLM's models


def engine_differences() -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield kinds of models, each with the configs of them that are refused, for the page about models."""
    for one in _DIFFERENCES:
        yield one.kinds, f"`{one.key}`: {one.reason}"
    yield BFLOAT16_ALONE, "`model.dtype` of the run file: vLLM has parts of them in bfloat16 alone"
    yield _ONE_WINDOW, "`use_sliding_window`, if only some layers have a window: vLLM has one for all or none"
    yield _NO_WINDOW, "`use_sliding_window`: neither vLLM nor transformers' layers compute it"
    yield _WINDOWS_OF_LAYERS, "`layer_types` with windows: vLLM looks at them, and transformers does not"


def why_computed_otherwise(config: dict[str, Any], *, on_cpu: bool) -> str:
    """Return why vLLM does not compute what a config says; empty if nothing is known against it."""
    kind = config.get("model_type")
    for one in _DIFFERENCES:
        if kind in one.kinds and one.wrong(config.get(one.key)):
            return f"{one.key} is {shown(config[one.key])}, and of a {kind} {one.reason}: take another model"
    if not isinstance(kind, str):
        return ""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", None) and _ONLY_SILU in engine_code(trained().get(kind, "")):
        return f"hidden_act is {shown(activation)}, and of a {kind} vLLM knows silu alone: take another model"
    if on_cpu and config.get("dual_chunk_attention_config"):
        return "vLLM has dual_chunk_attention_config on GPUs alone: remove it, or use a GPU"
    return _why_windows_differ(kind, config)


def _why_windows_differ(kind: str, config: dict[str, Any]) -> str:
    window = config.get("sliding_window")
    if kind in _WINDOWS_OF_LAYERS and window and _SLIDING in (config.get("layer_types") or ()):
        return f"layer_types gives layers a window, which of a {kind} vLLM alone computes: remove layer_types"
    if not window or not config.get("use_sliding_window"):
        return ""
    remedy = (
        f"if no prompt with its answer is longer than {shown(window)} tokens, set use_sliding_window to "
        "false and remove layer_types, else take another model"
    )
    if kind in _NO_WINDOW:
        return f"use_sliding_window is true, and of a {kind} nobody computes windows: {remedy}"
    if kind in _ONE_WINDOW and len(set(_layer_types(config))) > 1:
        return f"only some layers have a window, and of a {kind} vLLM gives all of them one or none: {remedy}"
    return ""


def _layer_types(config: dict[str, Any]) -> list[str]:
    from transformers import AutoConfig  # some seconds, for the few models that have windows

    try:
        return list(AutoConfig.for_model(**config).layer_types)
    except Exception:  # the config is damaged: whoever loads it says how
        return []

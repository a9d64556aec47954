"""The page about kinds of models: which are tried, and which are refused."""

from __future__ import annotations

from flows.run.inspection.engine_differences import engine_differences
from flows.run.inspection.supported_models import MIXTURES, REFUSED, TRIED, elsewhere, head_sizes

_HEAD = """# Models that can be trained

This page is made from the code: `python -m docs.generate`. `streamrl run FILE --check`, and every start, say
by a model's `config.json` whether it can be trained, before anything else is started.

A model is a decoder-only language model of Hugging Face transformers, with safetensors and a tokenizer in one
folder. The trainer needs its layers at `model`, its head at `lm_head`, and the attention that transformers'
models share. The engine, vLLM, must know its class, too. When the trainer loads a model, it compares its own
logits with those of transformers, and refuses a model where they differ.
"""


def models_page() -> str:
    """Return the page in Markdown."""
    lines = [_HEAD, "## Tried", ""]
    lines += [
        "Tests load a small model of each `model_type`, with random weights, as the trainer does, and",
        "compare the logprobs that the engine draws with:",
        "",
    ]
    lines += [", ".join(f"`{kind}`" for kind in TRIED) + ".", ""]
    lines += ["Of any other kind the check says that nobody has tried it, and the run goes on.", ""]
    mixtures = ", ".join(f"`{kind}`" for kind in TRIED if kind in MIXTURES)
    lines += [f"[Mixtures of experts](../how-to/mixtures.md) among them are {mixtures}.", ""]
    lines += ["## Refused", "", "| `model_type` | reason |", "|---|---|"]
    for reason in dict.fromkeys(REFUSED.values()):
        kinds = ", ".join(f"`{kind}`" for kind, why in REFUSED.items() if why == reason)
        lines.append(f"| {kinds} | {reason} |")
    places: dict[str, list[str]] = {}
    for kind, found in elsewhere().items():
        places.setdefault(" and ".join(f"`{part}`" for part in found), []).append(f"`{kind}`")
    for where, kinds_there in places.items():
        lines.append(f"| {', '.join(kinds_there)} | layers and head are at {where} |")
    lines += ["", "A config that scales or caps logits is refused, too: `logits_scaling`, `logit_scale`,"]
    lines += ["`final_logit_softcapping`, `attn_logit_softcapping`."]
    lines += ["", "## Computed otherwise by vLLM", ""]
    lines += ["A config of which vLLM would compute something else than the trainer is refused:", ""]
    lines += ["| `model_type` | config |", "|---|---|"]
    for kinds_so, text in engine_differences():
        lines.append(f"| {', '.join(f'`{kind}`' for kind in kinds_so)} | {text} |")
    sizes = ", ".join(map(str, head_sizes()))
    lines += ["", "## Sizes of attention heads", "", f"On CPUs vLLM generates with heads of size {sizes}."]
    lines += [
        "The size is `head_dim`, or else `hidden_size` divided by `num_attention_heads`. On GPUs it is not"
    ]
    lines += ["looked at before the start."]
    return "\n".join(lines)

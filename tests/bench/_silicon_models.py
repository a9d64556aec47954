"""The models of AIConfigurator's sample, by the counts of their public configs."""

from __future__ import annotations

from typing import Any

from flows.planning.roofline import Precision

_QWEN3 = {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}

CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        **_LLAMA, "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "intermediate_size": 14336,
    },
    "meta-llama/Llama-3.1-70B": {
        **_LLAMA, "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
        "intermediate_size": 28672,
    },
    "Qwen/Qwen3-32B": {
        **_QWEN3, "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 25600,
    },
    "Qwen/Qwen3-235B-A22B-FP8": {
        **_QWEN3, "model_type": "qwen3_moe", "num_hidden_layers": 94, "hidden_size": 4096,
        "num_attention_heads": 64, "num_key_value_heads": 4, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
    },
    "MiniMaxAI/MiniMax-M2.5": {
        "model_type": "minimax_m2", "num_hidden_layers": 62, "hidden_size": 3072, "num_attention_heads": 48,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536, "num_local_experts": 256,
        "num_experts_per_tok": 8, "vocab_size": 200064,
    },
    "openai/gpt-oss-120b": {
        "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128,
        "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
}  # fmt: skip

_MXFP4 = 4.25 / 8  # bytes of an element, with its share of a scale


def precision_of(model: str, gemm: str) -> Precision:
    """Return the bytes of a row's weights. gpt-oss has experts in MXFP4 and the rest in BF16."""
    if model == "openai/gpt-oss-120b":
        return Precision(experts=_MXFP4)
    return Precision(weights=1.0, fp8=True) if gemm.startswith("fp8") else Precision()

"""Models of real shapes with random weights, for benches of one GPU, and the work that they are given.

`python -m tests.bench._gpu_model FOLDER SIZE DEVICE` makes one, and leaves no memory of a GPU taken.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.weights.four_bits import rounded
from tests.factories import make_tiny_model

PROMPT = 48  # tokens
SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936},
    "7b": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512},
}  # fmt: skip


def sized_model(folder: Path, size: str, device: str, *, in_four_bits: bool = False) -> Path:
    """A Qwen2 model of a size in bf16, made on a device, with the tokenizer of the tiny model.

    `in_four_bits`: as `streamrl quantize` rounds it.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    make_tiny_model(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[size], max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=1,
        pad_token_id=0, bos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    if in_four_bits:
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.data = rounded(parameter.data).whole()
    model.save_pretrained(folder)
    return folder


def drawn_lengths(count: int, longest: int) -> list[int]:
    """Lengths of answers with a long tail, a median of a fourteenth of the longest one."""
    draw = np.random.default_rng(0)
    found = np.exp(np.log(longest / 14) + draw.standard_normal(count))
    return np.clip(found, 4, longest).astype(int).tolist()


def flops_of(shape: dict[str, Any], sizes: list[int], answers: int) -> float:
    """Floating-point operations of a training step, forward and backward, over sequences of these sizes."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    weights = layers * (2 * hidden * (hidden + keys) + 3 * hidden * shape["intermediate_size"])
    attention = sum(6 * layers * hidden * size * size for size in sizes)
    return float(6 * weights * sum(sizes) + 6 * hidden * shape["vocab_size"] * answers + attention)


if __name__ == "__main__":
    sized_model(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    print("RESULT {}")

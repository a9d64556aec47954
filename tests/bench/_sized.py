"""Models of a size, with random weights and the tokenizer of the tests' model."""

from __future__ import annotations

from pathlib import Path

import torch

_SHAPES = {"30M": (8, 512, 12_000), "100M": (12, 768, 24_000)}  # layers, width, words
SIZES = tuple(_SHAPES)


def make_model(folder: Path, size: str, dtype: str, longest: int = 512) -> Path:
    """A Qwen2."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.factories import make_tiny_model

    layers, width, words = _SHAPES[size]
    make_tiny_model(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=words, hidden_size=width, intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=width // 256,
        max_position_embeddings=longest, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder

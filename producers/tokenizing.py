"""Text to tokens and back, without importing torch where the model's folder allows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def load_tokenize(model: str) -> Callable[[str], list[int]]:
    """The model's tokenization of a prompt, without special tokens."""
    if fast := _fast(model):
        return lambda text: list(fast.encode(text, add_special_tokens=False).ids)
    slow = _slow(model)
    return lambda text: list(slow.encode(text, add_special_tokens=False))


def load_to_text(model: str) -> Callable[[np.ndarray], str]:
    """The text of tokens, without the special ones."""
    tokenizer = _fast(model) or _slow(model)
    return lambda tokens: str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def _fast(model: str) -> Any:
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def _slow(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)

"""Text to tokens for the feeder, without importing torch where the model's folder allows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def load_tokenize(model: str) -> Callable[[str], list[int]]:
    """The model's tokenization of a prompt, without special tokens."""
    file = Path(model) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(file))
        return lambda text: list(fast.encode(text, add_special_tokens=False).ids)
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(model)
    return lambda text: list(slow.encode(text, add_special_tokens=False))

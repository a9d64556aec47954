"""Turns text into tokens and back, without importing torch where the model's folder allows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infra.errors import Explained
from schemas.importing import said


class TokenizerError(Explained):
    """A model's tokenizer can't be used."""

    lasting = True


def load_tokenize(model: str) -> Callable[[str], list[int]]:
    """Return a function that tokenizes a prompt, without adding special tokens."""
    if fast := _fast(model):
        return lambda text: list(fast.encode(text, add_special_tokens=False).ids)
    slow = _slow(model)
    return lambda text: list(slow.encode(text, add_special_tokens=False))


def load_to_text(model: str) -> Callable[[np.ndarray], str]:
    """Return a function that turns tokens into text, without the special ones."""
    decode = load_decode(model)
    return lambda tokens: decode(tokens.tolist())


def load_decode(model: str) -> Callable[[Sequence[int]], str]:
    """Return a function that turns a list of tokens into text, without the special ones."""
    tokenizer = _fast(model) or _slow(model)
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))


def special_tokens(model: str) -> dict[str, int]:
    """Return the special tokens of a model by their names."""
    fast = _fast(model)
    known = fast.get_added_tokens_decoder() if fast else _slow(model).added_tokens_decoder
    return {token.content: number for number, token in known.items() if token.special}


def _fast(model: str) -> Any:
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    with _explained(file):
        return Tokenizer.from_file(str(file))


def load_whole_tokenizer(model: str) -> Any:
    """Return the tokenizer of transformers, which knows the chat template. Loading it takes seconds."""
    return _slow(model)


def _slow(model: str) -> Any:
    from transformers import AutoTokenizer

    with _explained(Path(model)):
        return AutoTokenizer.from_pretrained(model)


@contextlib.contextmanager
def _explained(place: Path) -> Iterator[None]:
    """Raise TokenizerError for any error: those of the tokenizer libraries have no common base class."""
    try:
        yield
    except Exception as error:
        raise TokenizerError(
            f"{place}: there is no tokenizer that can be read: {said(error)}. Save it with "
            "tokenizer.save_pretrained(), in the model's folder"
        ) from error

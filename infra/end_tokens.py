"""Finds the tokens that end an answer. Generator and trainer must agree on them, for sampling.min_tokens."""

from __future__ import annotations

from infra.errors import Explained
from schemas.importing import said


class EndTokensError(Explained):
    """Nobody can say which tokens end a model's answers."""


def end_tokens(model: str) -> list[int]:
    """Return the end tokens of the model in a folder, ascending, as vLLM finds them.

    These are the tokenizer's own, and those in generation_config.json, or in config.json without that file.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        own, config = AutoTokenizer.from_pretrained(model).eos_token_id, AutoConfig.from_pretrained(model)
        try:
            more = GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:
            more = GenerationConfig.from_model_config(config).eos_token_id
        vocabulary = int(config.get_text_config().vocab_size)
    except Exception as error:  # the libraries' errors have no common base class
        raise EndTokensError(
            f"{model}: the end tokens can't be found, which sampling.min_tokens needs: {said(error)}"
        ) from error
    given = more if isinstance(more, list) else [more]
    return sorted({int(token) for token in (own, *given) if token is not None and 0 <= token < vocabulary})

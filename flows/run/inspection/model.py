"""Inspects a model's folder without reading its tensors: config, tensors' headers, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from flows.run.inspection.architectures import generated, trained
from flows.run.inspection.finding import Finding
from flows.run.inspection.supported_models import TRIED, why_not_generated, why_not_trained
from infra.safetensors_header import NoHeader, header_of
from infra.weights.folder import ModelFolder
from infra.weights.weights_error import WeightsError
from schemas.shortening import printable, shown

_LARGEST_CONFIG = 8 << 20  # bytes
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class BadModel(ValueError):
    """A model's folder that can't be used; the message names the file."""


def look_at_model(folder: Path) -> Iterator[Finding]:
    """Yield a finding for each thing that is wrong with a folder, or one finding that says it is fine."""
    wrong = [*wrong_config(folder), *_missing_kind(folder), *wrong_tensors(folder), *no_tensors(folder)]
    wrong += _missing_tokenizer(folder)
    for text in wrong:
        yield Finding("model", text, wrong=True)
    if not wrong:
        shapes = len(ModelFolder(folder).shapes)
        kind = config_of(folder).get("model_type")
        untried = "" if kind in TRIED else "; nobody has tried to train this kind of model yet"
        said = f"{folder} has a {kind} of {shapes} tensors, and a tokenizer{untried}"
        yield Finding("model", said, noted=bool(untried))


def config_of(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json. Raises BadModel if it can't be read."""
    file = folder / "config.json"
    try:
        with file.open("rb") as opened:
            raw = opened.read(_LARGEST_CONFIG + 1)
        if len(raw) > _LARGEST_CONFIG:
            raise BadModel(f"{file} is no config: it is larger than {_LARGEST_CONFIG:,} bytes")
        config = json.loads(raw.decode())
    except BadModel:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise BadModel(f"{file} is damaged: {printable(str(error), 300)}. Save the model again") from None
    if not isinstance(config, dict):
        found = type(config).__name__
        raise BadModel(f"{file} is damaged: it is a {found}, not a mapping. Save the model again")
    return config


def wrong_config(folder: Path) -> list[str]:
    """Return why a model can't be used, by its config alone. A key that the config lacks is no fault here."""
    try:
        config = config_of(folder)
    except BadModel as error:
        return [str(error)]
    file = folder / "config.json"
    kind, classes = config.get("model_type"), config.get("architectures") or []
    if (kind is not None and not isinstance(kind, str)) or not (
        isinstance(classes, list) and all(isinstance(one, str) for one in classes)
    ):
        return [f"{file} is damaged: model_type is {shown(kind)} and architectures {shown(classes)}"]
    if kind and trained() and kind not in trained():
        return [f"{file}: model_type {shown(kind)} is no causal language model of the installed transformers"]
    known = generated() | set(trained().values())
    if classes and generated() and not known & set(classes):
        return [f"{file}: the installed vLLM does not generate with the architecture {shown(classes[0])}"]
    return [f"{file}: {why}" for why in (why_not_trained(config), why_not_generated(config)) if why]


def longest_context(folder: Path) -> int | None:
    """Return how many tokens a model holds by its config; None if that does not say. Raises BadModel."""
    config = config_of(folder)
    limit = config.get("max_position_embeddings")
    if limit is None:
        return _usual_context(config)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise BadModel(f"{folder / 'config.json'} is damaged: max_position_embeddings is {shown(limit)}")
    return limit


def _usual_context(config: dict[str, Any]) -> int | None:
    """Return how many tokens such a model holds where its config.json does not say; None if that is unknown.

    Trainer and engine take this number. Where rotary frequencies follow the length (`rope_type: dynamic`), a
    longer sample would change the logprobs of those beside it.
    """
    try:
        from transformers import AutoConfig  # some seconds, for the few configs without this key

        limit = AutoConfig.for_model(**config).max_position_embeddings
    except Exception:  # an unknown kind, or a damaged config: whoever loads it says so
        return None
    return limit if isinstance(limit, int) else None


def _missing_kind(folder: Path) -> list[str]:
    try:
        kind = config_of(folder).get("model_type")
    except BadModel:
        return []  # `wrong_config` says it
    if isinstance(kind, str) and kind:
        return []
    return [f"{folder / 'config.json'} has no model_type: it is not of a Hugging Face model"]


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def no_tensors(folder: Path) -> list[str]:
    """Return a problem if a model has no safetensors files: other files would have to be unpickled."""
    try:
        there = bool(ModelFolder(folder).files)
    except (WeightsError, OSError, RecursionError):
        return []  # `wrong_tensors` says it
    if there:
        return []
    return [f"{folder} has no model.safetensors: save the model with save_pretrained()"]


def _missing_tokenizer(folder: Path) -> list[str]:
    if has_tokenizer(folder):
        return []
    return [f"{folder} has no tokenizer: save it there with tokenizer.save_pretrained()"]


def wrong_tensors(folder: Path) -> list[str]:
    """Return what is wrong with the headers of a model's safetensors files, at most 8 problems."""
    try:
        files = ModelFolder(folder).files
    except (WeightsError, OSError, RecursionError) as error:
        return [printable(str(error), 500)]
    outside = [file for file in files if file.parent != folder]
    if outside:
        return [f"the index of {folder} names {shown(str(outside[0]))}, which is not in that folder"]
    return [text for file in files if (text := _wrong_header(file))][:8]


def _wrong_header(file: Path) -> str:
    try:
        raw, at = header_of(file)
        header, held = json.loads(raw), file.stat().st_size - at
        wrong = [name for name, one in header.items() if name != "__metadata__" and not _is_tensor(one, held)]
    except NoHeader as error:
        return f"{file} is damaged: {error}"
    except FileNotFoundError:
        return f"{file} is missing, and the folder's index names it"
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return f"{file} is damaged: its header can't be read: {printable(str(error), 200)}"
    return f"{file} is damaged: it does not hold the tensor {shown(wrong[0])}" if wrong else ""


def _is_tensor(said: Any, held: int) -> bool:
    if not isinstance(said, dict) or not isinstance(said.get("dtype"), str):
        return False
    span = said.get("data_offsets")
    if not _are_counts(said.get("shape")) or not _are_counts(span):
        return False
    return len(span) == 2 and span[0] <= span[1] <= held


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)

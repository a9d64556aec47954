"""Finds models and datasets of the Hugging Face Hub in this machine's cache, and fetches models.

$HF_HOME/hub/models--ORG--NAME/refs/main ──► snapshots/<revision>/    a folder like any other

A name is looked for in the cache first, so that a run that began with a network can go on without one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from infra.errors import Explained
from infra.weights.folder import ModelFolder
from infra.weights.weights_error import WeightsError
from schemas.importing import said

HubKind = Literal["model", "dataset"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_ANSWER_S = 5.0
# no pickled weights, and no code
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.jinja", "*.model"]


class HubError(Explained):
    """A model or a dataset of the Hub can't be had. The message says what to do."""


def is_hub_name(text: str) -> bool:
    """Whether a text may be a name on the Hub: ORG/NAME, and its first part is no folder here."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists() and not Path(text).parent.exists()


def cache_folder() -> Path:
    """Return the folder in which Hugging Face's libraries keep what they have fetched."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def cached(name: str, kind: HubKind = "model") -> Path | None:
    """Return the folder of a name in the cache; None if it is not there, or if a model is not whole."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, repo_type=kind, cache_dir=cache_folder(), local_files_only=True)
    except Exception:  # the library has many errors for it
        return None
    folder = Path(str(found))
    return folder if kind == "dataset" or _is_whole(folder) else None


def model_folder(path: str) -> Path | None:
    """Return the folder of a model that a path or a name on the Hub names; None if it is not here."""
    if Path(path).is_dir():
        return Path(path)
    return cached(path) if is_hub_name(path) else None


def fetch_model(name: str) -> Path:
    """Return the folder of a model in the cache. Fetches what is missing. Raises HubError."""
    if (here := cached(name)) is not None:
        return here
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(str(snapshot_download(name, cache_dir=cache_folder(), allow_patterns=_WANTED)))
    except Exception as error:
        raise HubError(advice(name, "model", said(error))) from error


def why_not(name: str, kind: HubKind = "model") -> str:
    """Ask the Hub for a name. Return why it can't be fetched, with what to do; empty if it can."""
    if is_offline():
        return advice(name, kind, "HF_HUB_OFFLINE is set")
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_ANSWER_S)
    except Exception as error:
        return advice(name, kind, said(error))
    return ""


def is_offline() -> bool:
    """Whether the environment forbids Hugging Face's libraries to use the network."""
    given = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return given.upper() in ("1", "ON", "YES", "TRUE")


def advice(name: str, kind: HubKind, reason: str) -> str:
    """Return a paragraph: what is not here, why it can't be fetched, and what to do."""
    flag = " --repo-type dataset" if kind == "dataset" else ""
    short = " ".join(reason.split())[:300]
    return (
        f"there is no folder {name}, the {kind} of that name is not whole in the Hugging Face cache "
        f"({cache_folder()}), and the Hub does not give it ({short}). With a network, run `hf download {name}"
        f"{flag}` (of a private or gated one after `hf auth login`); without one, do so on another machine, "
        "copy the folder here and write its path, or set HF_HOME to a cache that has it"
    )


def _is_whole(folder: Path) -> bool:
    try:
        files = ModelFolder(folder).files
    except (WeightsError, OSError, RecursionError):
        return False
    return (folder / "config.json").is_file() and bool(files) and all(file.is_file() for file in files)

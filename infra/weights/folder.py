"""Reads the safetensors files of a Hugging Face model's folder: tensors by name, mapped into memory."""

from __future__ import annotations

import json
import logging
import mmap
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.weights.bits import Bits, Entry, file_header, file_model
from infra.weights.digest import model_digests, root_digest
from infra.weights.weights_error import WeightsError

if TYPE_CHECKING:
    import torch

SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
VERSION_FILE = "weights.json"  # in a folder that was pulled, says which version it holds
_BESIDE = 64 << 20  # bytes: larger files beside the tensors are no config and no tokenizer
_LONGEST = 128  # characters of a file's name
_INDEX = 64 << 20  # bytes of an index: enough for a million tensors
# Names of files that are sent with a version; all other files stay in the folder.
_TRAVELS = re.compile(
    r"""(config|generation_config|adapter_config|(quantize?|hf_quant)_config|quantization_config
      |preprocessor_config|processor_config|(image|video|audio)_(pre)?processor_config|feature_extractor_config
      |special_tokens_map|added_tokens|chat_template|vocab|tokenizer(_config)?)\.json
    |[A-Za-z0-9_-]*\.tiktoken|tokenizer\.model(\.v\d+)?|(tokenizer|spiece|sentencepiece(\.bpe)?)\.model|tekken\.json
    |vocab\.txt|merges\.txt|chat_template\.jinja|(README|LICENSE|LICENCE|NOTICE)(\.(md|txt))?""",
    re.VERBOSE | re.ASCII,
)

_log = logging.getLogger("streamrl.weights")


def is_beside(name: str) -> bool:
    """Whether a file of a model's folder is sent with the tensors, such as config, tokenizer or licence."""
    return _TRAVELS.fullmatch(name) is not None


def inside(folder: Path, name: object) -> Path:
    """Return the path of a file in a folder, by its plain name. Raises WeightsError if it leads elsewhere.

    A link may lead to another file of the folder, or to the blobs of Hugging Face's cache that it is in.
    """
    plain = isinstance(name, str) and 0 < len(name) <= _LONGEST and name not in (".", "..")
    if not isinstance(name, str) or not plain or set(name) & set("/\\\0"):
        raise WeightsError(f"{folder} names {str(name)[:200]!r}, which is no plain name of a file in it")
    path = folder / name
    if path.is_symlink():
        home, there = folder.resolve(), path.resolve()
        blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
        if there.parent not in (home, blobs):
            raise WeightsError(f"{path} leads out of the folder, to {there}: put the file itself there")
    return path


_said: set[tuple[Path, tuple[str, ...]]] = set()  # folders and left-out files that were logged: each once


def index_of(file: Path) -> set[object]:
    """Return the files that an index names. Raises WeightsError if it can't be read."""
    try:
        with file.open("rb") as opened:
            return index_in(opened.read(_INDEX + 1), str(file))
    except OSError as error:
        raise WeightsError(f"{file} can't be read: {error}") from error


def index_in(raw: bytes, where: str) -> set[object]:
    """Like `index_of`, for the index's bytes. `where` names them in errors."""
    if len(raw) > _INDEX:
        raise WeightsError(f"{where} has more than {_INDEX} bytes")
    try:
        return set(json.loads(raw)["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WeightsError(f"{where} is damaged: {error!r}"[:1000]) from error


def opened(path: str | Path) -> ModelFolder:
    """Open the model in a folder; or the adapter, if that is all that the folder holds."""
    found = ModelFolder(path)
    return found if found.files or not AdapterFolder(path).files else AdapterFolder(path)


class ModelFolder:
    """A model in a Hugging Face folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def files(self) -> list[Path]:
        """The files with the model's tensors; empty if the model is in another format."""
        if (self.path / INDEX).is_file():
            return sorted(inside(self.path, name) for name in index_of(inside(self.path, INDEX)))
        return [inside(self.path, SINGLE)] if (self.path / SINGLE).is_file() else []

    @property
    def beside(self) -> dict[str, bytes]:
        """The contents of the files that are sent with the tensors, by name. Logs which are left out."""
        tensors = {file.name for file in self.files} | {INDEX, VERSION_FILE}
        found: dict[str, bytes] = {}
        others = []
        for path in sorted(self.path.glob("*")):
            if not path.is_file() or path.name in tensors:
                continue
            if is_beside(path.name) and path.stat().st_size <= _BESIDE:
                found[path.name] = inside(self.path, path.name).read_bytes()
            else:
                others.append(path.name)
        self._say_left_out(tuple(others))
        return found

    def _say_left_out(self, names: tuple[str, ...]) -> None:
        if names and (self.path, names) not in _said:
            _said.add((self.path, names))
            _log.warning(
                "of %s only tensors, config and tokenizer are sent; left out: %s",
                self.path, ", ".join(names)[:1000],
            )  # fmt: skip

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of each tensor, by name."""
        return {name: list(header[1]) for name, (_, header) in self._headers.items()}

    @cached_property
    def root(self) -> str:
        """The root over all tensors, see `infra.weights.digest`. Computing it reads them all."""
        return root_digest(model_digests(self.bits()))

    def bits(self) -> dict[str, Bits]:
        """Return all tensors, backed by the files, which must not be written to."""
        found: dict[str, Bits] = {}
        for file in self._needed():
            try:
                with file.open("rb") as opened:
                    found |= file_model(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
            except (OSError, ValueError) as error:
                raise WeightsError(f"{file} can't be read: {error}") from error
        return found

    @property
    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._headers)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, backed by the file, which must not be written to."""
        from safetensors import safe_open

        if name not in self._headers:
            raise WeightsError(f"the model in {self.path} has no tensor {name}")
        file = self._headers[name][0]
        if file not in self._open:
            self._open[file] = safe_open(str(file), framework="pt")
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor

    @cached_property
    def _open(self) -> dict[Path, Any]:
        return {}

    @cached_property
    def _headers(self) -> dict[str, tuple[Path, Entry]]:
        found: dict[str, tuple[Path, Entry]] = {}
        for file in self.files:
            try:
                with (
                    file.open("rb") as opened,
                    mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
                ):
                    found |= {name: (file, entry) for name, entry in file_header(data)[0].items()}
            except (OSError, ValueError) as error:
                raise WeightsError(f"{file} can't be read: {error}") from error
        return found

    def _needed(self) -> list[Path]:
        if not self.files:
            raise WeightsError(f"{self.path} has no {SINGLE}: save the model with save_pretrained()")
        return self.files


class AdapterFolder(ModelFolder):
    """A folder with a LoRA adapter, as peft saves it."""

    @cached_property
    def files(self) -> list[Path]:
        """The file with the adapter's tensors; empty if it is not there."""
        return [inside(self.path, ADAPTER)] if (self.path / ADAPTER).is_file() else []

    @property
    def base(self) -> Path | None:
        """The folder of the model that the adapter is for; None if its configuration does not say."""
        try:
            said = json.loads((self.path / "adapter_config.json").read_text())["base_model_name_or_path"]
            return Path(str(said)) if said else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

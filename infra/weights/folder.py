"""The safetensors files of a Hugging Face model's folder: tensors by name, mapped into memory."""

from __future__ import annotations

import json
import mmap
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.weights.bits import Bits, file_model
from infra.weights.digest import model_digests, root_digest
from infra.weights.errors import WeightsError

if TYPE_CHECKING:
    import torch

SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
MARK = "weights.json"  # in a folder that was pulled: which version it holds
_BESIDE = 64 << 20  # bytes: larger files beside the tensors are no config and no tokenizer
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def is_beside(name: str) -> bool:
    """Whether a file of a model's folder is no weights, but what they need: config, tokenizer."""
    return not name.endswith(_WEIGHTS) and not name.startswith(".") and name != MARK


def opened(path: str | Path) -> ModelFolder:
    """The model in a folder; or the adapter, if that is all that it holds."""
    found = ModelFolder(path)
    return found if found.files or not AdapterFolder(path).files else AdapterFolder(path)


class ModelFolder:
    """A model as it lies in a folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def files(self) -> list[Path]:
        """Its files of tensors; none if it keeps them in another format."""
        if (self.path / INDEX).is_file():
            try:
                names = set(json.loads((self.path / INDEX).read_text())["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise WeightsError(f"{self.path / INDEX} is damaged: {error!r}") from error
            return sorted(self.path / name for name in names)
        return [self.path / SINGLE] if (self.path / SINGLE).is_file() else []

    @property
    def beside(self) -> dict[str, bytes]:
        """What lies beside the tensors, by name."""
        return {
            path.name: path.read_bytes()
            for path in sorted(self.path.glob("*"))
            if path.is_file() and is_beside(path.name) and path.stat().st_size <= _BESIDE
        }

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Of each tensor."""
        return {name: header["shape"] for name, (_, header) in self._headers.items()}

    @cached_property
    def root(self) -> str:
        """Hash over all tensors, as `infra.weights.digest` has it; it reads them all."""
        return root_digest(model_digests(self.bits()))

    def bits(self) -> dict[str, Bits]:
        """All tensors, backed by the files: not to be written to."""
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
        """Of all tensors, in order."""
        return sorted(self._headers)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, backed by the file: not to be written to."""
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
    def _headers(self) -> dict[str, tuple[Path, dict[str, Any]]]:
        found: dict[str, tuple[Path, dict[str, Any]]] = {}
        for file in self.files:
            try:
                with file.open("rb") as opened:
                    header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
                header.pop("__metadata__", None)
                found |= {name: (file, tensor) for name, tensor in header.items()}
            except (OSError, ValueError, AttributeError, MemoryError, OverflowError) as error:
                raise WeightsError(f"{file} can't be read: {error}") from error
        return found

    def _needed(self) -> list[Path]:
        if not self.files:
            raise WeightsError(f"{self.path} has no {SINGLE}: save the model with save_pretrained()")
        return self.files


class AdapterFolder(ModelFolder):
    """An adapter as peft saves it."""

    @cached_property
    def files(self) -> list[Path]:
        """The one that has its tensors, if it is there."""
        return [self.path / ADAPTER] if (self.path / ADAPTER).is_file() else []

    @property
    def base(self) -> Path | None:
        """The model that it is for, by its configuration."""
        try:
            said = json.loads((self.path / "adapter_config.json").read_text())["base_model_name_or_path"]
            return Path(str(said)) if said else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

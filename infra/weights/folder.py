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

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class ModelFolder:
    """A model as it lies in a folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def files(self) -> list[Path]:
        """Its files of tensors; none if it keeps them in another format."""
        if (self.path / _INDEX).is_file():
            try:
                names = set(json.loads((self.path / _INDEX).read_text())["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise WeightsError(f"{self.path / _INDEX} is damaged: {error!r}") from error
            return sorted(self.path / name for name in names)
        return [self.path / _SINGLE] if (self.path / _SINGLE).is_file() else []

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
            raise WeightsError(f"{self.path} has no {_SINGLE}: save the model with save_pretrained()")
        return self.files

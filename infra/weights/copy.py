"""A version in memory as a safetensors file: chunks are applied to it in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from infra.weights.bits import Bits, blank_file, file_model
from infra.weights.manifest import Tensor, VersionManifest
from infra.weights.weights_error import WeightsError

if TYPE_CHECKING:
    import torch


class Copy:
    """A version that a reader holds. `version` is None while the tensors are of no version."""

    def __init__(self, file: bytearray, version: int | None = None, root: str | None = None) -> None:
        self.file, self.version, self.root = file, version, root
        self.model: dict[str, Bits] = file_model(file)

    @classmethod
    def blank(cls, tensors: Mapping[str, Tensor]) -> Copy:
        """Return a copy with a version's tensors, all zeros. Raises WeightsError if memory is short."""
        try:
            return cls(blank_file({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}))
        except (MemoryError, OverflowError) as error:
            size = sum(tensor.size for tensor in tensors.values())
            raise WeightsError(f"there is no memory for a model of {size} bytes here") from error

    def fits(self, manifest: VersionManifest) -> bool:
        """Whether the copy's tensors have the names, types and shapes of a version's."""
        return {name: (bits.dtype, bits.shape) for name, bits in self.model.items()} == {
            name: (tensor.dtype, tensor.shape) for name, tensor in manifest.tensors.items()
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors for torch, copied. Raises WeightsError if torch lacks one of the types."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load(bytes(self.file))
        except (SafetensorError, KeyError) as error:  # torch lacks a type
            raise WeightsError(f"version {self.version} is no safetensors file: {error}") from error

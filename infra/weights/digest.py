"""Hashes of weights: one per tensor, one root over all. The same of torch's tensors and of a file's bytes.

torch is imported where there are tensors: who only checks a file does without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from mmap import mmap
from typing import TYPE_CHECKING

from blake3 import blake3

from infra.weights.bits import Bits, Model, bits_of, file_model, type_name

if TYPE_CHECKING:
    import torch


class TensorHash:
    """Hash of dtype, shape and bits; the bits come piece by piece."""

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self._hash = blake3(f"{type_name(dtype)}{list(shape)}".encode() + b"\0")

    def update(self, data: bytes | memoryview) -> None:
        """The next bits."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        """The hash, when all have come."""
        return str(self._hash.hexdigest(16))


def digest_of(bits: Bits) -> str:
    """Hash of dtype, shape and bits."""
    found = TensorHash(bits.dtype, bits.shape)
    found.update(bits.raw)
    return found.hexdigest()


def root_digest(digests: Mapping[str, str]) -> str:
    """Hash of all names and hashes, in the order of names."""
    whole = blake3()
    for name in sorted(digests):
        whole.update(f"{name}={digests[name]}\n".encode())
    return whole.hexdigest(16)


def model_digests(model: Model) -> dict[str, str]:
    """Hash of each tensor of a model."""
    return {name: digest_of(bits) for name, bits in model.items()}


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hash of a tensor."""
    return digest_of(bits_of(tensor))


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Hash of each tensor."""
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def file_digests(data: bytes | bytearray | mmap) -> dict[str, str]:
    """Hash of each tensor in a safetensors file. ValueError if it isn't one."""
    return model_digests(file_model(data))

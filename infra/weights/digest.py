"""Hashes of weights: one per tensor, and one root over all. torch's tensors and a file's bytes hash alike.

torch is imported only where its tensors are given: checking a file does without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from blake3 import blake3

from infra import choices
from infra.weights.bits import Bits, Model, bits_of, type_name

if TYPE_CHECKING:
    import torch


class TensorHash:
    """The hash of a tensor's type, shape and bits; the bits are added piece by piece.

    `all_cores`: whether a piece is hashed by as many threads as there are cores.
    """

    def __init__(self, dtype: str, shape: Sequence[int], *, all_cores: bool = False) -> None:
        head = f"{type_name(dtype)}{list(shape)}".encode() + b"\0"
        most = choices.cores() if choices.CORES.forced() else blake3.AUTO  # a number costs a pool each time
        self._hash = blake3(head, max_threads=most if all_cores else 1)

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bits."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        """Return the hash, after all bits were added."""
        return str(self._hash.hexdigest(16))


def digest_of(bits: Bits) -> str:
    """Return the hash of a tensor's type, shape and bits."""
    found = TensorHash(bits.dtype, bits.shape)
    found.update(bits.raw)
    return found.hexdigest()


def root_digest(digests: Mapping[str, str]) -> str:
    """Return the root: the hash of all names and tensors' hashes, in the order of names."""
    whole = blake3()
    for name in sorted(digests):
        whole.update(f"{name}={digests[name]}\n".encode())
    return whole.hexdigest(16)


def model_digests(model: Model) -> dict[str, str]:
    """Return the hash of each tensor of a model, by name."""
    return {name: digest_of(bits) for name, bits in model.items()}


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the hash of a tensor of torch."""
    return digest_of(bits_of(tensor))


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the hash of each tensor of torch, by name."""
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}

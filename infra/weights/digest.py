"""Hashes of weights: one per tensor, one root over all. The same for torch, numpy and an engine's own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from blake3 import blake3


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hash of dtype, shape and bits."""
    plain = tensor.detach().to("cpu").contiguous()
    head = f"{str(plain.dtype).removeprefix('torch.')}{list(plain.shape)}".encode()
    return blake3(head + b"\0").update(plain.view(-1).view(torch.uint8).numpy()).hexdigest(16)


def root_digest(digests: Mapping[str, str]) -> str:
    """Hash of all names and hashes, in the order of names."""
    whole = blake3()
    for name in sorted(digests):
        whole.update(f"{name}={digests[name]}\n".encode())
    return whole.hexdigest(16)


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Hash of each tensor."""
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}

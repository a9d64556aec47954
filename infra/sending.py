"""Brings tensors to a GPU without waiting for the work that the GPU still has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device. Memory that can be paged out would be copied when the GPU is idle.

    torch uses the pinned memory for another tensor only when the copy is done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

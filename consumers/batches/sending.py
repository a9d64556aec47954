"""Brings a micro-batch's tensors to a GPU without waiting for the work that the GPU still has."""

from __future__ import annotations

import torch


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device. Memory that can be paged out would be copied when the GPU is idle."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

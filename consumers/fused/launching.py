"""Where fused operations run, and in which type they answer."""

from __future__ import annotations

import os

import torch

from infra import choices


def runs_on(device: torch.device) -> bool:
    """Return whether Triton's kernels run there: on a GPU, or anywhere in Triton's interpreter."""
    if choices.FUSED.forced() == "off":
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def answer_type(*operands: torch.Tensor) -> torch.dtype:
    """Return the type of a result: within autocast autocast's, since the next layer would cast it to that."""
    device = operands[0].device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    found = operands[0].dtype
    for one in operands[1:]:
        found = torch.promote_types(found, one.dtype)
    return found


def power_of_two(number: int) -> int:
    """Return the least power of two that is no smaller: the sizes of blocks in Triton."""
    return 1 << max(0, number - 1).bit_length()

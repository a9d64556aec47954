"""The most memory that training took so far: what a setting of the trainer costs."""

from __future__ import annotations

import resource

import torch

from infra import choices

_GIB = 1 << 30
_KIB = 1 << 10


def peak_memory_gib() -> float:
    """Return the most GiB that this process held so far: of its GPU, or without one of main memory."""
    if choices.cuda():
        return torch.cuda.max_memory_allocated() / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB / _GIB

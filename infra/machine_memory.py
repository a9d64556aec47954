"""Main memory of this machine, or of the container that this process is in."""

from __future__ import annotations

import psutil

from infra.container_limits import ContainerLimits


def whole_memory() -> int:
    """Return the bytes that all processes here may take together."""
    return min(psutil.virtual_memory().total, ContainerLimits().memory() or 1 << 62)


def free_memory() -> int:
    """Return the bytes that may still be taken."""
    left = ContainerLimits().memory_left()
    available = int(psutil.virtual_memory().available)
    return available if left is None else min(available, left)

"""The numbers that a launcher, such as torchrun, gives to the processes that it starts."""

from __future__ import annotations

import os
import re

from infra.errors import Explained
from schemas.shortening import printable

_LOCAL_RANK = "LOCAL_RANK"
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torchrun's name, and DeepSpeed's
_NUMBER = re.compile(r"[0-9]{1,9}")
_LONGEST_SHOWN = 60


class WrongLaunch(Explained):
    """A launcher has not started a process as it can be started."""

    lasting = True


def local_rank() -> int | None:
    """Return the number of this process among those of its machine; None if no launcher has given it one.

    Raises WrongLaunch if it is no number.
    """
    said = os.environ.get(_LOCAL_RANK, "").strip()
    if said and not _NUMBER.fullmatch(said):
        raise WrongLaunch(
            f"{_LOCAL_RANK}={printable(said, _LONGEST_SHOWN)} is not a whole number from 0 on: a launcher "
            "sets it to the number of a rank on its machine. Set it to that, or unset it without a launcher"
        )
    return int(said) if said else None


def processes_here() -> int:
    """Return how many processes a launcher has started on this machine, at least; 1 without a launcher."""
    return max(1 + (local_rank() or 0), *map(_count, _LOCAL_SIZES))


def processes_everywhere() -> int:
    """Return how many processes a launcher has started on all machines, by WORLD_SIZE; 1 if it is odd."""
    return _count("WORLD_SIZE")


def _count(name: str) -> int:
    said = os.environ.get(name, "").strip()
    return max(1, int(said)) if _NUMBER.fullmatch(said) else 1

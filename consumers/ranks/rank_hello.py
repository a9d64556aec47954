"""The first words of a trainer's rank on another machine."""

from __future__ import annotations

import msgspec


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first frame of a rank of another machine."""

    local: int  # number among the ranks of its machine
    versions: str  # of the code that computes

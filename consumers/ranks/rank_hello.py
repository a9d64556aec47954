"""The first words of a trainer's rank on another machine."""

from __future__ import annotations

import msgspec

from infra.ranks.handshake import versions


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first frame of a rank of another machine."""

    local: int  # number among the ranks of its machine
    versions: str  # of the code that computes


def rank_versions(*, deepspeed: bool = True) -> str:
    """Return the versions of the code that a rank computes with. `deepspeed`: with that, if it is there."""
    return versions(*(["deepspeed"] if deepspeed else []))


def are_fit(theirs: str, needed: str) -> bool:
    """Whether the versions that a rank has are those that the trainer needs; others are of no interest."""
    return set(needed.split(", ")) <= set(theirs.split(", "))

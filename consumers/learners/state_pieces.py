"""Pieces of tensors of which each rank has some elements: they are named after the elements that they have.

    weights.a[0:16777216]   weights.a[16777216:20000000]   …

A piece is small enough to be read whole by a rank that needs only some of it: so each piece can be verified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

LARGEST_PIECE = 1 << 24  # elements
_NAME = re.compile(r"(.+)\[(\d{1,18}):(\d{1,18})\]")


def pieces(name: str, first: int, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the pieces of a tensor's elements from `first` on: views of `flat`, which has one dimension."""
    found = {}
    for at in range(0, flat.numel(), LARGEST_PIECE):
        part = flat[at : at + LARGEST_PIECE]
        found[f"{name}[{first + at}:{first + at + part.numel()}]"] = part
    return found


def piece_of(name: str) -> tuple[str, int, int] | None:
    """Return tensor, first element and end of a piece; None if this is not a piece's name."""
    found = _NAME.fullmatch(name)
    return (found[1], int(found[2]), int(found[3])) if found else None


@runtime_checkable
class InPieces(Protocol):
    """A state of which some elements of a tensor can be read without the others."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def flat(self, name: str, first: int, count: int) -> torch.Tensor:
        """Return `count` elements of a tensor from `first` on."""


class StateShare:
    """A rank's part of weights and optimizer state. `prefix` stands before all names."""

    def __init__(self, prefix: str, steps: int) -> None:
        self._prefix, self._steps = prefix, steps
        self.live = dict[str, torch.Tensor]()  # pieces
        self.whole = {f"{prefix}steps": torch.tensor(steps)}  # the same on all ranks
        self.shapes = dict[str, tuple[int, ...]]()  # of the tensors that the pieces are of

    def add(
        self, name: str, shape: tuple[int, ...], first: int, weights: torch.Tensor,
        moments: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """Add the elements of a parameter from `first` on, and their moments: flat tensors."""
        flats = {f"{self._prefix}weights.{name}": weights}
        for key, moment in moments.items():
            flats[f"{self._prefix}optimizer.{key}.{name}"] = moment
        if moments:
            self.whole[f"{self._prefix}optimizer.step.{name}"] = torch.tensor(float(self._steps))
        for one, flat in flats.items():
            self.live |= pieces(one, first, flat)
            self.shapes[one] = shape


def elements_of(state: Mapping[str, torch.Tensor], name: str, first: int, count: int) -> torch.Tensor | None:
    """Return `count` elements of a tensor from `first` on, flat; None if the state has no such tensor."""
    if isinstance(state, InPieces):
        return state.flat(name, first, count) if state.has(name) else None
    whole = state.get(name)
    return None if whole is None else whole.reshape(-1)[first : first + count]

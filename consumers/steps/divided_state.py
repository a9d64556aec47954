"""A state that ranks wrote part by part. A reader needs no file of which it wants nothing.

state-00000.safetensors   weights.a[0:50]    weights.b[0:7]    steps  rng
state-00001.safetensors   weights.a[50:100]  weights.b[7:14]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache

import torch

from consumers.learners.collective import Outline
from consumers.learners.snapshot import PartPlace
from consumers.steps.checkpoint_manifest import Damaged, DividedManifest, state_name
from consumers.steps.checkpoint_state import StoredState
from consumers.steps.state_layout import layout_of
from infra.stores.store import Store
from infra.weights.bits import NAMES


class DividedState(Mapping[str, torch.Tensor]):
    """The tensors of such a state. Each piece is read when it is asked for, and checked."""

    fresh = True  # the caller gets the only copy of a tensor

    def __init__(self, store: Store, manifest: DividedManifest, store_id: str = "") -> None:
        self.place = PartPlace(store.url, manifest.run, manifest.iteration, manifest.trainer_epoch, store_id)
        folder = manifest.state.rpartition("/")[0]
        self._layout = layout_of(manifest.shapes, manifest.parts)
        self._parts = range(len(manifest.parts))
        self._part = cache(
            lambda number: StoredState(store, f"{folder}/{state_name(number)}", manifest.parts[number])
        )

    @property
    def outlines(self) -> list[Outline]:
        """Name, dtype and shape of each tensor."""
        return [(name, NAMES[one.dtype][0], list(one.shape)) for name, one in self._layout.items()]

    def verify(self) -> None:
        """Read all tensors, keep none, and raise Damaged if a bit is wrong."""
        for number in self._parts:
            self._part(number).verify()

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._layout

    def flat(self, name: str, first: int, count: int) -> torch.Tensor:
        """Return `count` elements of a tensor from `first` on."""
        layout, last = self._layout[name], first + count
        if not 0 <= first <= last <= math.prod(layout.shape):
            raise Damaged(
                f"{name} of the checkpoint has shape {list(layout.shape)}: it is of another model than this"
            )
        some = [piece for piece in layout.pieces if piece.first < last and piece.end > first]
        files = [self._part(piece.part) for piece in some]  # they are looked at before memory is taken
        found = torch.empty(count, dtype=getattr(torch, NAMES[layout.dtype][0]))
        for piece, file in zip(some, files, strict=True):
            begin, end = max(first, piece.first), min(last, piece.end)
            elements = file[piece.name].reshape(-1)
            found[begin - first : end - first] = elements[begin - piece.first : end - piece.first]
        return found

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._layout[name].shape
        return self.flat(name, 0, math.prod(shape)).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)

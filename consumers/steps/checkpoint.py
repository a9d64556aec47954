"""Checkpoints: weights, optimizer, random state and stream positions, committed by one manifest written last.

runs/<run>/checkpoints/i000040-e02/state.safetensors   or, from ranks that share the state out,
                                   state-00000.safetensors, state-00001.safetensors …
runs/<run>/checkpoints/i000040-e02/manifest.json       the commit point
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

from consumers.learners.snapshot import PartPlace, Shapes, StateSnapshot
from consumers.steps import checkpoint_manifest as manifests
from consumers.steps import checkpoint_state as states
from consumers.steps.checkpoint_manifest import (
    AnyCheckpointManifest,
    CheckpointManifest,
    Damaged,
    DividedManifest,
    FirstManifest,
    StoredManifest,
)
from consumers.steps.divided_state import DividedState
from consumers.steps.state_parts import folder_of, forget_said, other_parts
from infra.keys import KeyRing, ring_from_env
from infra.stores.store import Missing, Store
from infra.weights.manifest import Tensor

__all__ = [
    "AnyCheckpointManifest", "CheckpointManifest", "Checkpoints", "Damaged", "FoundCheckpoint", "RunPosition",
]  # fmt: skip

FoundCheckpoint = tuple[AnyCheckpointManifest, Mapping[str, torch.Tensor]]
_Found = TypeVar("_Found")
Warn = Callable[[str], None]
RestoreFunction = Callable[[Mapping[str, torch.Tensor]], None]


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """The place between two iterations at which a checkpoint stands. The manifest has the same fields."""

    iteration: int
    trainer_epoch: int
    step: int
    root: str
    positions: Mapping[int, int]
    ledger: int
    letters: int | None = None
    roots: Mapping[int, str] = field(default_factory=dict)
    taken: Sequence[int] = ()
    redrawn: Sequence[int] = ()


@dataclass(frozen=True)
class WrittenState:
    """A state, or rank 0's part of it, that is in the store."""

    place: PartPlace
    tensors: Mapping[str, Tensor]
    shapes: Shapes | None  # None: it is the whole state
    ranks: int
    took_s: float


StateWriting = Future[WrittenState]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self, store: Store, run: str, keys: KeyRing | None = None,
        moved: Callable[[], None] = lambda: None, *, store_id: str = "",
    ) -> None:  # fmt: skip
        """`moved` is called whenever the store has taken a piece of a state.

        `store_id`: of the store, which other ranks look at before they write there.
        """
        self._store_id = store_id
        self._store, self._run, self._keys, self._moved = store, run, keys or ring_from_env(), moved
        self._prefix = f"runs/{run}/checkpoints"
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def place(self, iteration: int, trainer_epoch: int) -> PartPlace:
        """Return where the ranks of a learner write their parts of a state."""
        return PartPlace(self._store.url, self._run, iteration, trainer_epoch, self._store_id)

    def begin(self, state: StateSnapshot, place: PartPlace) -> StateWriting:
        """Write a state in another thread; `save` waits for it and commits it."""
        return self._writer.submit(self._written, state, place)

    def _written(self, state: StateSnapshot, place: PartPlace) -> WrittenState:
        began = time.monotonic()
        key = f"{folder_of(place)}/{manifests.state_name(None if state.shapes is None else 0)}"
        try:
            tensors = states.write(self._store, key, state, self._moved)
        finally:
            state.abandon()
        return WrittenState(place, tensors, state.shapes, state.ranks, time.monotonic() - began)

    def save(
        self, state: StateWriting | Mapping[str, torch.Tensor], at: RunPosition, *, keep: int,
        deadline_s: float = math.inf, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Write a checkpoint or wait until it is written, commit it, and remove all but the newest `keep`.

        `deadline_s`: for parts of other ranks. `check` raises if one of these has ended.
        """
        if isinstance(state, Mapping):
            written = self._written(StateSnapshot({}, state), self.place(at.iteration, at.trainer_epoch))
        else:
            written = state.result()
        manifest = self._manifest_of(written, at, deadline_s, check)
        folder = folder_of(written.place)
        self._store.put_new(f"{folder}/manifest.json", manifests.written(manifest, self._keys))
        forget_said(self._store, written.place, written.ranks)
        self._collect(keep, at.iteration, at.trainer_epoch)

    def _manifest_of(
        self, written: WrittenState, at: RunPosition, deadline_s: float, check: Callable[[], None]
    ) -> CheckpointManifest | DividedManifest:
        said: dict[str, Any] = {
            "run": self._run, "iteration": at.iteration, "step": at.step, "root": at.root,
            "positions": dict(at.positions), "ledger": at.ledger, "letters": at.letters,
            "roots": dict(at.roots), "taken": list(at.taken), "redrawn": list(at.redrawn),
            "trainer_epoch": at.trainer_epoch, "created_at": time.time(),
        }  # fmt: skip
        folder = folder_of(written.place)
        if written.shapes is None:
            return CheckpointManifest(
                format=2,
                state=f"{folder}/{manifests.state_name(None)}",
                tensors=dict(written.tensors),
                **said,
            )
        others = other_parts(
            self._store, written.place, written.ranks, self._keys, took_s=written.took_s,
            deadline_s=deadline_s, moved=self._moved, check=check,
        )  # fmt: skip
        try:
            return DividedManifest(
                format=3, state=f"{folder}/{manifests.state_name(0)}", shapes=dict(written.shapes),
                parts=[dict(part) for part in (written.tensors, *others)], **said,
            )  # fmt: skip
        except ValidationError as error:
            raise Damaged(f"{folder}: the ranks wrote no whole state: {str(error)[:500]}") from error

    def _collect(self, keep: int, iteration: int, trainer_epoch: int) -> None:
        """Remove all but the newest checkpoints. Manifests go first, so that none points to nothing.

        The one that was just written stays, too: what claims to be newer may be damaged, or a stranger's.
        A state without a manifest was left by a dead trainer and is removed, unless it may still be written.
        """
        keys = self._store.list(self._prefix)
        known = _manifests(keys)
        gone = [key for key in known[:-keep] if _order(key) != (iteration, trainer_epoch)]
        kept = {_folder(key) for key in known if key not in gone}
        for key in gone:
            self._store.delete(key)
        for key in keys:
            numbers = _order(key)
            if numbers is None or _folder(key) in kept or key in known:
                continue
            if numbers[::-1] < (trainer_epoch, iteration):
                self._store.delete(key)

    def latest(self, warn: Warn) -> FoundCheckpoint | None:
        """Return the newest whole checkpoint; None if there are none. Raises Damaged if all are damaged.

        `warn` is told of each damaged one that is passed over. The state is verified; its tensors are read
        again when they are asked for.
        """
        return self._undamaged(lambda damaged: self.before(sys.maxsize, damaged), warn)

    def restored(self, restore: RestoreFunction, warn: Warn) -> AnyCheckpointManifest | None:
        """Give the newest whole checkpoint to `restore`, and return its manifest; None if there are none.

        The state is read once. If it turns out damaged on the way, an older one is restored over it.
        """

        def try_each(damaged: Warn) -> AnyCheckpointManifest | None:
            for manifest in self._readable(sys.maxsize, damaged):
                try:
                    restore(self._state(manifest))
                except Damaged as error:
                    damaged(str(error))
                else:
                    return manifest
            return None

        return self._undamaged(try_each, warn)

    def _undamaged(self, find: Callable[[Warn], _Found | None], warn: Warn) -> _Found | None:
        for key in self._store.list(self._prefix):
            if _order(key) is None:
                warn(f"{self._store.url}/{key} is in no folder of a checkpoint: it is left alone")
        damaged: list[str] = []
        found = find(damaged.append)
        if found is None and damaged:
            raise Damaged(f"no checkpoint can be read: {'; '.join(damaged)}")  # or all training would be lost
        for what in damaged:
            warn(f"{what}: an older checkpoint stands in for it")
        return found

    def before(self, step: int, warn: Warn) -> FoundCheckpoint | None:
        """Return the newest whole checkpoint from which step `step` can be reached; None if there is none."""
        for manifest in self._readable(step, warn):
            try:
                state = self._state(manifest)
                if isinstance(state, states.StoredState | DividedState):
                    state.verify()
            except Damaged as error:
                warn(str(error))
            else:
                return manifest, state
        return None

    def _readable(self, step: int, warn: Warn) -> Iterator[StoredManifest]:
        """Yield manifests from which step `step` can be reached, the newest first."""
        for key in reversed(_manifests(self._store.list(self._prefix))):
            try:
                manifest = self._manifest(key)
            except Damaged as error:
                warn(str(error))
                continue
            if manifest.step <= step:
                yield manifest

    def _manifest(self, key: str) -> StoredManifest:
        where = f"{self._store.url}/{key}"
        try:
            if (size := self._store.size(key)) > manifests.LARGEST_MANIFEST:
                raise Damaged(f"{where} has {size} bytes: no checkpoint's manifest is as large")
            found = manifests.read_checkpoint_manifest(self._store.get(key), where, self._keys)
        except Missing as error:
            raise Damaged(f"{where} was removed while it was read") from error
        own = f"{_folder(key)}/{manifests.state_name(0 if isinstance(found, DividedManifest) else None)}"
        if (found.run, found.iteration, found.trainer_epoch) != (self._run, *(_order(key) or ())):
            raise Damaged(
                f"{where} says that it is of run {found.run[:64]}, iteration {found.iteration}, start "
                f"{found.trainer_epoch} of the trainer: it belongs elsewhere"
            )
        if found.state != own:
            raise Damaged(f"{where} names {found.state[:200]} as its state, which is not beside it")
        return found

    def stored(self, place: PartPlace) -> Mapping[str, torch.Tensor]:
        """Return the state of a checkpoint. Raises Damaged."""
        return self._state(self._manifest(f"{folder_of(place)}/manifest.json"))

    def _state(self, manifest: StoredManifest) -> Mapping[str, torch.Tensor]:
        if isinstance(manifest, FirstManifest):
            return states.read_first(self._store, manifest)
        if isinstance(manifest, DividedManifest):
            return DividedState(self._store, manifest, self._store_id)
        return states.StoredState(self._store, manifest.state, manifest.tensors)


def _manifests(keys: Iterable[str]) -> list[str]:
    """Return the keys of manifests, oldest first. Each stands for a whole checkpoint."""
    found = ((_order(key), key) for key in keys if key.endswith("/manifest.json"))
    return [key for _, key in sorted((numbers, key) for numbers, key in found if numbers is not None)]


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def _order(key: str) -> tuple[int, int] | None:
    """Return iteration and start of the trainer from a checkpoint's key; None for other keys."""
    parts = key.split("/")
    return manifests.numbers_of(parts[-2]) if len(parts) == 5 else None

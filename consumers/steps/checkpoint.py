"""Checkpoints: weights, optimizer, random state and stream positions, committed by one manifest written last.

runs/<run>/checkpoints/i000040-e02/state.safetensors
runs/<run>/checkpoints/i000040-e02/manifest.json      the commit point
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from consumers.learners.snapshot import StateSnapshot
from consumers.steps import checkpoint_manifest as manifests
from consumers.steps import checkpoint_state as states
from consumers.steps.checkpoint_manifest import (
    AnyCheckpointManifest,
    CheckpointManifest,
    Damaged,
    FirstManifest,
)
from infra.keys import KeyRing, ring_from_env
from infra.stores.store import Missing, Store
from infra.weights.manifest import Tensor

__all__ = [
    "AnyCheckpointManifest", "CheckpointManifest", "Checkpoints", "Damaged", "FoundCheckpoint", "RunPosition",
]  # fmt: skip

FoundCheckpoint = tuple[AnyCheckpointManifest, Mapping[str, torch.Tensor]]
_Found = TypeVar("_Found")
Warn = Callable[[str], None]
StateWriting = Future[Mapping[str, Tensor]]
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


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self, store: Store, run: str, keys: KeyRing | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`moved` is called whenever the store has taken a piece of a state."""
        self._store, self._run, self._keys, self._moved = store, run, keys or ring_from_env(), moved
        self._prefix = f"runs/{run}/checkpoints"
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def begin(self, state: StateSnapshot, iteration: int, trainer_epoch: int) -> StateWriting:
        """Write a state in another thread; `save` waits for it and commits it."""
        return self._writer.submit(self._written, state, iteration, trainer_epoch)

    def _written(self, state: StateSnapshot, iteration: int, trainer_epoch: int) -> Mapping[str, Tensor]:
        try:
            return states.write(self._store, self._state_key(iteration, trainer_epoch), state, self._moved)
        finally:
            state.abandon()

    def _state_key(self, iteration: int, trainer_epoch: int) -> str:
        return f"{self._prefix}/{manifests.checkpoint_name(iteration, trainer_epoch)}/state.safetensors"

    def save(self, state: StateWriting | Mapping[str, torch.Tensor], at: RunPosition, *, keep: int) -> None:
        """Write a checkpoint or wait until it is written, commit it, and remove all but the newest `keep`."""
        key = self._state_key(at.iteration, at.trainer_epoch)
        if isinstance(state, Mapping):
            tensors = self._written(StateSnapshot({}, state), at.iteration, at.trainer_epoch)
        else:
            tensors = state.result()
        manifest = CheckpointManifest(
            format=2, run=self._run, iteration=at.iteration, step=at.step, root=at.root,
            positions=dict(at.positions), ledger=at.ledger, letters=at.letters, roots=dict(at.roots),
            taken=list(at.taken), redrawn=list(at.redrawn),
            trainer_epoch=at.trainer_epoch, state=key, tensors=dict(tensors), created_at=time.time(),
        )  # fmt: skip
        self._store.put_new(f"{_folder(key)}/manifest.json", manifests.written(manifest, self._keys))
        self._collect(keep, at.iteration, at.trainer_epoch)

    def _collect(self, keep: int, iteration: int, trainer_epoch: int) -> None:
        """Remove all but the newest checkpoints. Manifests go first, so that none points to nothing.

        A state without a manifest was left by a dead trainer and is removed, unless it may still be written.
        """
        keys = self._store.list(self._prefix)
        known = _manifests(keys)
        kept = {_folder(key) for key in known[-keep:]}
        for key in known[:-keep]:
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
                if isinstance(state, states.StoredState):
                    state.verify()
            except Damaged as error:
                warn(str(error))
            else:
                return manifest, state
        return None

    def _readable(self, step: int, warn: Warn) -> Iterator[CheckpointManifest | FirstManifest]:
        """Yield manifests from which step `step` can be reached, the newest first."""
        for key in reversed(_manifests(self._store.list(self._prefix))):
            try:
                manifest = self._manifest(key)
            except Damaged as error:
                warn(str(error))
                continue
            if manifest.step <= step:
                yield manifest

    def _manifest(self, key: str) -> CheckpointManifest | FirstManifest:
        where = f"{self._store.url}/{key}"
        try:
            if (size := self._store.size(key)) > manifests.LARGEST_MANIFEST:
                raise Damaged(f"{where} has {size} bytes: no checkpoint's manifest is as large")
            found = manifests.read_checkpoint_manifest(self._store.get(key), where, self._keys)
        except Missing as error:
            raise Damaged(f"{where} was removed while it was read") from error
        own = f"{_folder(key)}/state.safetensors"
        if (found.run, found.iteration, found.trainer_epoch) != (self._run, *(_order(key) or ())):
            raise Damaged(
                f"{where} says that it is of run {found.run[:64]}, iteration {found.iteration}, start "
                f"{found.trainer_epoch} of the trainer: it belongs elsewhere"
            )
        if found.state != own:
            raise Damaged(f"{where} names {found.state[:200]} as its state, which is not beside it")
        return found

    def _state(self, manifest: CheckpointManifest | FirstManifest) -> Mapping[str, torch.Tensor]:
        if isinstance(manifest, FirstManifest):
            return states.read_first(self._store, manifest)
        return states.StoredState(self._store, manifest)


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

"""Checkpoints: weights, optimizer, RNG and stream positions, committed by one manifest written last.

runs/<run>/checkpoints/i000040-e02/state.safetensors
runs/<run>/checkpoints/i000040-e02/manifest.json      the commit point
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from infra.store import Store, StoreError


class Damaged(StoreError):
    """A checkpoint that can't be read."""


class CheckpointManifest(BaseModel):
    """One checkpoint: the state between two iterations."""

    model_config = ConfigDict(extra="forbid")

    format: int = 1
    run: str
    iteration: int  # the next one to train
    step: int  # the next optimizer step
    root: str  # of the weights
    positions: dict[int, int]  # by partition of `<run>.samples`: what lies before is trained
    ledger: int  # position in `<run>.ledger`: the steps behind it are run again from their records
    letters: int | None = None  # position in `<run>.dead`: letters before it are of no interest any more
    roots: dict[int, str] = {}  # of versions whose samples may still come
    trainer_epoch: int
    state: str  # key of the state's object
    digest: str
    created_at: float


Found = tuple[CheckpointManifest, dict[str, torch.Tensor]]


class Checkpoints:
    """A run's checkpoints."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._prefix = f"runs/{run}/checkpoints"

    def save(self, state: Mapping[str, torch.Tensor], *, keep: int, iteration: int, trainer_epoch: int,
             step: int, root: str, positions: Mapping[int, int], ledger: int, letters: int | None = None,
             roots: Mapping[int, str] | None = None) -> None:  # fmt: skip
        """Write a checkpoint, then remove the oldest ones."""
        folder = f"{self._prefix}/i{iteration:06d}-e{trainer_epoch:02d}"
        data = save_safetensors(dict(state))
        manifest = CheckpointManifest(
            run=self._run, iteration=iteration, step=step, root=root, positions=dict(positions),
            ledger=ledger, letters=letters, roots=dict(roots or {}), trainer_epoch=trainer_epoch,
            state=f"{folder}/state.safetensors",
            digest=blake3(data).hexdigest(), created_at=time.time(),
        )  # fmt: skip
        self._store.put(manifest.state, data)
        self._store.put_new(f"{folder}/manifest.json", manifest.model_dump_json().encode())
        self._collect(keep, trainer_epoch)

    def _collect(self, keep: int, trainer_epoch: int) -> None:
        """Remove all but the newest; manifests go first, so that none points to nothing."""
        keys = self._store.list(self._prefix)
        manifests = _manifests(keys)
        kept = {_folder(key) for key in manifests[-keep:]}
        for key in manifests[:-keep]:
            self._store.delete(key)
        for key in keys:
            if _folder(key) not in kept and key not in manifests and _order(key)[1] <= trainer_epoch:
                self._store.delete(key)  # also what a trainer left that died before its manifest

    def latest(self, warn: Callable[[str], None]) -> Found | None:
        """The newest whole checkpoint; `warn` is told of damaged ones, which older ones stand in for."""
        damaged: list[str] = []
        found = self.before(sys.maxsize, damaged.append)
        if found is None and damaged:
            raise Damaged(f"no checkpoint can be read: {'; '.join(damaged)}")  # what is trained would be lost
        for what in damaged:
            warn(f"{what}: an older checkpoint stands in for it")
        return found

    def before(self, step: int, warn: Callable[[str], None]) -> Found | None:
        """The newest whole checkpoint from which a step can be reached."""
        for key in reversed(_manifests(self._store.list(self._prefix))):
            try:
                manifest = self._manifest(key)
                if manifest.step <= step:
                    return self._load(manifest)
            except Damaged as error:
                warn(str(error))
        return None

    def _manifest(self, key: str) -> CheckpointManifest:
        try:
            return CheckpointManifest.model_validate(json.loads(self._store.get(key)))
        except (ValidationError, ValueError, RecursionError) as error:
            raise Damaged(f"{self._store.url}/{key} is not a checkpoint's manifest: {error}") from error

    def _load(self, manifest: CheckpointManifest) -> Found:
        data = self._store.get(manifest.state)
        if blake3(data).hexdigest() != manifest.digest:
            raise Damaged(f"{self._store.url}/{manifest.state} has other bits than its manifest says")
        try:
            return manifest, load_safetensors(data)
        except SafetensorError as error:
            raise Damaged(f"{self._store.url}/{manifest.state} is damaged: {error}") from error


def _manifests(keys: Iterable[str]) -> list[str]:
    """Those of whole checkpoints, oldest first."""
    return sorted((key for key in keys if key.endswith("/manifest.json")), key=_order)


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def _order(key: str) -> tuple[int, int]:
    """Iteration and start of the trainer, of a key of a checkpoint."""
    iteration, _, epoch = _folder(key).rpartition("/")[2].removeprefix("i").partition("-e")
    return int(iteration), int(epoch)

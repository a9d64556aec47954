"""Checkpoints: weights, optimizer, RNG and stream positions, committed by one manifest written last.

runs/<run>/checkpoints/i000040-e02/state.safetensors
runs/<run>/checkpoints/i000040-e02/manifest.json      the commit point
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

import torch
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from infra.store import Exists, Store, StoreError


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
    recipe: str
    trainer_epoch: int
    state: str  # key of the state's object
    digest: str
    created_at: float


class Checkpoints:
    """A run's checkpoints."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._prefix = f"runs/{run}/checkpoints"

    def save(self, state: Mapping[str, torch.Tensor], *, keep: int, iteration: int, trainer_epoch: int,
             step: int, root: str, positions: Mapping[int, int], ledger: int,
             recipe: str) -> None:  # fmt: skip
        """Write a checkpoint, then remove the oldest ones."""
        folder = f"{self._prefix}/i{iteration:06d}-e{trainer_epoch:02d}"
        data = save_safetensors(dict(state))
        manifest = CheckpointManifest(
            run=self._run, iteration=iteration, step=step, root=root, positions=dict(positions),
            ledger=ledger, recipe=recipe, trainer_epoch=trainer_epoch, state=f"{folder}/state.safetensors",
            digest=blake3(data).hexdigest(), created_at=time.time(),
        )  # fmt: skip
        self._store.put(manifest.state, data)
        self._store.put_new(f"{folder}/manifest.json", manifest.model_dump_json().encode())
        for key in self._manifests()[:-keep]:
            self._store.delete(key)
            self._store.delete(key.replace("manifest.json", "state.safetensors"))

    def latest(self) -> tuple[CheckpointManifest, dict[str, torch.Tensor]] | None:
        """The newest whole checkpoint."""
        keys = self._manifests()
        if not keys:
            return None
        try:
            manifest = CheckpointManifest.model_validate(json.loads(self._store.get(keys[-1])))
        except (ValidationError, ValueError) as error:
            raise StoreError(
                f"{self._store.url}/{keys[-1]} is not a checkpoint's manifest: {error}"
            ) from error
        data = self._store.get(manifest.state)
        if blake3(data).hexdigest() != manifest.digest:
            raise StoreError(f"{self._store.url}/{manifest.state} has other bits than its manifest says")
        try:
            return manifest, load_safetensors(data)
        except SafetensorError as error:
            raise StoreError(f"{self._store.url}/{manifest.state} is damaged: {error}") from error

    def _manifests(self) -> list[str]:
        return [key for key in self._store.list(self._prefix) if key.endswith("/manifest.json")]


def next_trainer_epoch(store: Store, run: str) -> int:
    """A number for this start of a trainer; of two that start at once each gets its own."""
    epoch = len(store.list(f"runs/{run}/trainers"))
    while True:
        try:
            store.put_new(f"runs/{run}/trainers/e{epoch:02d}.json", json.dumps({"at": time.time()}).encode())
            return epoch
        except Exists:
            epoch += 1

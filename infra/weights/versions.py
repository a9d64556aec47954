"""Versions of the weights in the object store.

runs/<run>/weights/v000012/model.safetensors    the tensors, by Hugging Face names
runs/<run>/weights/v000012/manifest.json        put last and never overwritten: the only commit point
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.store import Exists, Missing, Store
from infra.weights.digest import digests_of, file_digests, root_digest
from infra.weights.errors import WeightsError

if TYPE_CHECKING:
    import torch


class Manifest(BaseModel):
    """What a version is."""

    model_config = ConfigDict(extra="forbid")

    format: int = 1
    run: str
    version: int
    root: str
    digests: dict[str, str]
    file: str
    size: int
    base: str | None = None  # of an adapter: root of the model that it belongs to
    trainer_epoch: int
    created_at: float


class WeightStore:
    """Publishes and fetches versions."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._prefix = f"runs/{run}/weights"

    def manifest_key(self, version: int) -> str:
        """Where a version's manifest lies."""
        return f"{self._prefix}/v{version:06d}/manifest.json"

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], *, trainer_epoch: int,
        base: str | None = None,
    ) -> Manifest:  # fmt: skip
        """Put a version; if it is there already with the same bits, that is fine (a trainer resumed).

        `base`: the tensors are an adapter of the model with this root.
        """
        import torch
        from safetensors.torch import save

        bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
        if bad:
            raise WeightsError(f"version {version} is not published: NaN or infinity in {', '.join(bad[:3])}")
        digests = digests_of(tensors)
        root = root_digest(digests)
        known = self.find(version)
        if known is not None:
            return self._same(known, root, base)
        # the root in the name: two trainers that race can't mix one's manifest with the other's tensors
        file = f"{self._prefix}/v{version:06d}/{root[:12]}.safetensors"
        data = save(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            metadata={"format": "pt"},  # transformers asks for it
        )
        self._store.put(file, data)
        manifest = Manifest(
            run=self._run, version=version, root=root, digests=digests, file=file, size=len(data),
            base=base, trainer_epoch=trainer_epoch, created_at=time.time(),
        )  # fmt: skip
        try:
            self._store.put_new(self.manifest_key(version), manifest.model_dump_json().encode())
        except Exists:
            return self._same(self.manifest(version), root, base)
        return manifest

    def _same(self, known: Manifest, root: str, base: str | None) -> Manifest:
        if known.base != base:
            raise WeightsError(
                f"version {known.version} of run {self._run} is published for the base {known.base}, not for "
                f"{base}: this trainer started from another model"
            )
        if known.root != root:
            raise WeightsError(
                f"version {known.version} of run {self._run} is published with other bits "
                f"({known.root[:12]}, not {root[:12]}): another trainer is at work on this run"
            )
        return known

    def find(self, version: int) -> Manifest | None:
        """A version's manifest, if it is published."""
        try:
            return self.manifest(version)
        except Missing:
            return None

    def manifest(self, version: int) -> Manifest:
        """A version's manifest."""
        key = self.manifest_key(version)
        try:
            manifest = Manifest.model_validate(json.loads(self._store.get(key)))
        except (ValidationError, ValueError) as error:
            raise WeightsError(f"{self._store.url}/{key} is not a weights manifest: {error}") from error
        if manifest.run != self._run or manifest.version != version:
            raise WeightsError(
                f"{self._store.url}/{key} is of run {manifest.run}, version {manifest.version}; "
                f"{self._run}, {version} is expected"
            )
        return manifest

    def fetch(self, version: int, *, root: str | None = None) -> tuple[Manifest, dict[str, torch.Tensor]]:
        """A version's tensors, verified bit by bit."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        manifest, data = self.fetch_file(version, root=root)
        try:
            return manifest, load(data)
        except SafetensorError as error:
            raise WeightsError(f"{self._store.url}/{manifest.file} is damaged: {error}") from error

    def fetch_file(self, version: int, *, root: str | None = None) -> tuple[Manifest, bytes]:
        """A version's safetensors file, its tensors verified bit by bit."""
        manifest = self.manifest(version)
        if root is not None and manifest.root != root:
            raise WeightsError(
                f"version {version} has root {manifest.root[:12]} in the store; {root[:12]} was announced"
            )
        data = self._store.get(manifest.file)
        try:
            found = file_digests(data)
        except ValueError as error:
            raise WeightsError(f"{self._store.url}/{manifest.file} is damaged: {error}") from error
        wrong = [
            name for name in {*found, *manifest.digests} if found.get(name) != manifest.digests.get(name)
        ]
        if wrong:
            raise WeightsError(
                f"{self._store.url}/{manifest.file}: wrong bits in {', '.join(sorted(wrong)[:3])}"
            )
        return manifest, data

    def versions(self) -> list[int]:
        """All published versions, oldest first."""
        pattern = re.compile(rf"{re.escape(self._prefix)}/v(\d+)/manifest\.json")
        found = (pattern.fullmatch(key) for key in self._store.list(self._prefix))
        return sorted(int(match[1]) for match in found if match)

    def collect(self, keep: int) -> None:
        """Remove all but the newest versions; the manifest goes first, so that none points to nothing."""
        keys = self._store.list(self._prefix)
        manifests = sorted(key for key in keys if key.endswith("/manifest.json"))
        for key in manifests[:-keep]:
            self._store.delete(key)
        oldest = _folder(manifests[-keep:][0]) if manifests else ""
        for key in keys:
            if _folder(key) < oldest and key not in manifests:
                self._store.delete(key)  # also what was left by a crash in here


def _folder(key: str) -> str:
    return key.rpartition("/")[0]

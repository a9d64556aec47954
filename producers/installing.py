"""Makes a patch of each new version: the difference between its weights and those that the engine holds.

copy (newest, see `weights_watch.py`) ──┐
held (what the engine holds) ───────────┴──► patch ──► prepared ──► installed ──► verified
                                                  beside decoding   the pause    beside decoding

A generator's process holds two copies of the weights and a patch. The patch is as large as a third copy for
the first version, and where most weights change. For an engine that holds weights in eight bits, the second
copy and the patch are of these: the engine itself never has the plain ones.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from infra.weights.adapter_tensors import Merging, check_fits
from infra.weights.bits import Bits, Model, file_model
from infra.weights.copy import Copy
from infra.weights.digest import model_digests
from infra.weights.folder import ModelFolder
from infra.weights.manifest import VersionManifest
from infra.weights.patch import PatchFile
from producers.engine_form import EngineForm
from schemas.generation import GeneratorSection
from schemas.runspec import ModelSection

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class VerifiedWeights:
    """Verified weights, ready to be installed."""

    version: int
    root: str
    digests: Mapping[str, str]  # of the tensors that came, or their slices, as the engine must hold them
    patch: PatchFile
    _claimed: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def claim(self) -> bool:
        """Return True to the first caller only: the engine that installs it, or `Newest`, which voids it."""
        return self._claimed.acquire(blocking=False)


def merged_model(spec: ModelSection, base: ModelFolder, adapter: Mapping[str, torch.Tensor]) -> Model:
    """Return the layers that an adapter changes, merged: engines know no adapters."""
    return file_model(Merging(spec, base).file(adapter))


class Newest:
    """Makes each new version a patch of the weights that the engine will hold by then."""

    def __init__(self, spec: ModelSection, base: ModelFolder, engine: GeneratorSection) -> None:
        self._spec, self._base = spec, base
        self._form = EngineForm(base.path, engine)
        self._held: dict[str, Bits] = {}
        self._root: str | None = None  # of `_held`
        self._given: VerifiedWeights | None = None

    def version(self, manifest: VersionManifest, copy: Copy) -> VerifiedWeights:
        """Make a version ready for the engine.

        The one before becomes void, unless the engine has claimed it.
        """
        check_fits(manifest, self._spec, self._base)
        new, digests = self._form.rounded(*self._whole(manifest, copy))
        self._settle()
        patch = PatchFile(self._held, new, since=self._root, root=manifest.root)
        held = self._form.held(new, digests)
        self._given = VerifiedWeights(manifest.version, manifest.root, held, patch)
        return self._given

    def _whole(self, manifest: VersionManifest, copy: Copy) -> tuple[Model, Mapping[str, str]]:
        """Return whole tensors and their digests."""
        if self._spec.lora is None:
            return copy.model, manifest.digests
        merged = merged_model(self._spec, self._base, copy.tensors())
        return merged, model_digests(merged)

    def _settle(self) -> None:
        """Settle whether the engine takes the version that was given last. If so, `_held` follows."""
        given, self._given = self._given, None
        if given is not None and not given.claim():
            given.patch.read().apply(self._held)
            self._root = given.root

"""Checks that a version can be of the model that its run began with, before memory is taken for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from infra.weights.adapter_tensors import layers_of, names_of
from infra.weights.folder import ModelFolder
from infra.weights.manifest import VersionManifest
from infra.weights.weights_error import WeightsError
from schemas.runspec import ModelSection

_WIDEST = 8  # bytes of the widest element


class Expected:
    """Checks manifests against the folder of a model. If the folder has no tensors, nothing is checked."""

    def __init__(self, spec: ModelSection, base: ModelFolder) -> None:
        self._spec, self._base = spec, base

    def check(self, manifest: VersionManifest) -> None:
        """Raise WeightsError unless a version may be one of this model."""
        shapes = self._base.shapes
        if not shapes:
            return
        if manifest.base is not None:
            self._check_adapter(manifest, shapes)
            return
        for name, tensor in manifest.tensors.items():
            if name in shapes and tuple(shapes[name]) != tensor.shape:
                raise self._wrong(manifest, name, tensor.shape, shapes[name])
        most = 2 * _WIDEST * sum(map(math.prod, shapes.values()))  # tied tensors may be listed twice
        if manifest.size > most:
            raise WeightsError(
                f"version {manifest.version} of run {manifest.run} says that it has {manifest.size} bytes; "
                f"of the model in {self._base.path} it can have {most} at most"
            )

    def _check_adapter(self, manifest: VersionManifest, shapes: Mapping[str, Sequence[int]]) -> None:
        for layer in layers_of(manifest.tensors):
            a, b = (manifest.tensors[name].shape for name in names_of(layer))
            whole = shapes.get(f"{layer}.weight")
            rank = self._spec.lora.rank if self._spec.lora else a[:1] and a[0]
            if whole is None or len(whole) != 2 or (a, b) != ((rank, whole[1]), (whole[0], rank)):
                raise self._wrong(manifest, layer, (*a, *b), whole or ())

    def _wrong(
        self, manifest: VersionManifest, name: str, said: Sequence[int], there: Sequence[int]
    ) -> WeightsError:
        return WeightsError(
            f"version {manifest.version} of run {manifest.run} is of another model: {name} is {list(said)} "
            f"in it, and {list(there)} in {self._base.path}"
        )

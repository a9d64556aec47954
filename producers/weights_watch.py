"""Follows `<run>.weights`: fetches and verifies each new version beside the engine's work.

An adapter is merged here, into the layers that it changes: an engine only ever takes whole tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from infra.bus import Record
from infra.process import Context
from infra.tail import Tail
from infra.weights.adapter import Merging, check_fits
from infra.weights.copy import Copy
from infra.weights.digest import file_digests
from infra.weights.folder import ModelFolder
from infra.weights.manifest import Manifest
from infra.weights.versions import WeightStore
from schemas.messages import WeightsAnnouncement
from schemas.runspec import ModelSection
from schemas.wire import decode


@dataclass(frozen=True)
class Version:
    """Verified weights, ready to be installed."""

    version: int
    root: str
    digests: Mapping[str, str]  # of the tensors in `file`
    file: bytes | bytearray  # safetensors


def watch_weights(context: Context, bell: threading.Event) -> Tail[Version]:
    """The newest announced version, whenever there is a newer one."""
    weights = WeightStore(context.store, context.run)
    base = ModelFolder(context.record.model)
    have = -1
    copy: Copy | None = None  # of the newest version: of the next one only what changed is fetched

    def fetch(records: list[Record]) -> list[Version]:
        nonlocal have, copy
        announced = decode(records[-1].value, WeightsAnnouncement)
        if announced.version <= have:
            return []
        manifest, copy = weights.update(copy, announced.version, root=announced.root)
        have = announced.version
        return [installable(manifest, copy, context.spec.model, base)]

    return Tail(context.bus.reader(context.topics.weights), fetch, bell)


def installable(manifest: Manifest, copy: Copy, spec: ModelSection, base: ModelFolder) -> Version:
    """A version as an engine takes it: no later change of the copy is seen in it."""
    check_fits(manifest, spec, base)
    if spec.lora is None:
        return Version(manifest.version, manifest.root, manifest.digests, bytes(copy.file))
    merged = Merging(spec, base).file(copy.tensors())
    return Version(manifest.version, manifest.root, file_digests(merged), merged)

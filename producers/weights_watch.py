"""Follows `<run>.weights`: fetches and verifies each new version beside the engine's work."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from infra.bus import Record
from infra.process import Context
from infra.tail import Tail
from infra.weights.versions import WeightStore
from schemas.messages import WeightsAnnouncement
from schemas.wire import decode


@dataclass(frozen=True)
class Version:
    """Verified weights, ready to be installed."""

    version: int
    root: str
    digests: Mapping[str, str]
    file: bytes  # safetensors


def watch_weights(context: Context, bell: threading.Event) -> Tail[Version]:
    """The newest announced version, whenever there is a newer one."""
    weights = WeightStore(context.store, context.run)
    have = -1

    def fetch(records: list[Record]) -> list[Version]:
        nonlocal have
        announced = decode(records[-1].value, WeightsAnnouncement)
        if announced.version <= have:
            return []
        manifest, file = weights.fetch_file(announced.version, root=announced.root)
        have = announced.version
        return [Version(announced.version, manifest.root, manifest.digests, file)]

    return Tail(context.bus.reader(context.topics.weights), fetch, bell)

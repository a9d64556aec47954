"""Follows `<run>.weights`: fetches and verifies each new version beside the engine's work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from infra.process import EXPECTED, Context
from infra.weights.versions import WeightStore
from schemas.messages import WeightsAnnouncement
from schemas.wire import decode


@dataclass(frozen=True)
class Version:
    """Verified weights, ready to be installed."""

    version: int
    root: str
    digests: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]


class WeightsWatch:
    """A thread that keeps the newest announced version at hand."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._weights = WeightStore(context.store, context.run)
        self._ready: queue.SimpleQueue[Version | BaseException] = queue.SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._follow, daemon=True, name="weights").start()

    def newest(self) -> Version | None:
        """The newest version since the last call, if there is one."""
        newest: Version | None = None
        while True:
            try:
                item = self._ready.get_nowait()
            except queue.Empty:
                return newest
            if isinstance(item, BaseException):
                raise item
            newest = item

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _follow(self) -> None:
        try:
            reader = self._context.bus.reader(self._context.topics.weights)
            have = -1
            while not self._closed.is_set():
                records = reader.poll(0.5)
                if not records:
                    continue
                announced = decode(records[-1].value, WeightsAnnouncement)
                if announced.version <= have:
                    continue
                manifest, tensors = self._weights.fetch(announced.version, root=announced.root)
                self._ready.put(Version(announced.version, manifest.root, manifest.digests, tensors))
                have = announced.version
            reader.close()
        except EXPECTED as error:
            self._ready.put(error)

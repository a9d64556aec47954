"""Follows `<run>.weights`: fetches and verifies each new version beside the engine's work."""

from __future__ import annotations

import threading

from infra.bus import Record
from infra.process import Context
from infra.sites.followed import Followed
from infra.store import StoreError
from infra.tail import Tail
from infra.waiting import Wait
from infra.weights.copy import Copy
from infra.weights.errors import WeightsError
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from producers.installing import Newest, Version


def watch_weights(context: Context, bell: threading.Event) -> Tail[Version]:
    """The newest version to be had, whenever there is a newer one."""
    return Tail(context.bus.reader(context.topics.weights), _Watch(context).take, bell, always=True)


class _Watch:
    """Hears of versions and fetches them. What can't be had is tried again, and the one before stays."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._followed = Followed(context.site.name if context.site else None)
        self._weights = _weights(context)
        self._newest = Newest(context.spec.model, ModelFolder(context.record.model))
        self._have = -1
        self._copy: Copy | None = None  # of the newest version: of the next one only what changed is fetched
        self._failing: Wait | None = None

    def take(self, records: list[Record]) -> list[Version]:
        """A version as it is installed, if there is a newer one."""
        for record in records:
            self._followed.hear(record)
        wanted = self._followed.choose(self._have)
        if wanted is None:
            return []
        try:
            manifest, self._copy = self._weights.update(self._copy, wanted.version, root=wanted.root)
        except (StoreError, WeightsError) as error:
            if self._failing is None:
                kept = f"weights {self._have} stay in use" if self._have >= 0 else "there are none yet"
                self._context.log.warning("weights %d can't be had, %s: %s", wanted.version, kept, error)
                self._failing = Wait(
                    f"weights {wanted.version} ({error})", unblocked_by="the object store",
                    deadline_s=self._context.spec.deadlines.progress_s,
                )  # fmt: skip
            self._failing.check()
            return []
        self._have, self._failing = wanted.version, None
        return [self._newest.version(manifest, self._copy)]


def _weights(context: Context) -> WeightStore:
    """The run's weights; at a site, as they are seen from there."""
    if context.site is None:
        return WeightStore(context.store, context.run)
    deadline_s = context.spec.deadlines.progress_s
    store = context.site.store(context.store, deadline_s=deadline_s, stop=context.stop)
    return WeightStore(store, context.run, near=store.near)

"""Follows `<run>.weights`: fetches and verifies each new version while the engine works.

waits for                     unblocked by
an announced version          the trainer
chunks, at a site             its relay, which brings them to the site's cache; silence of the relay
"""

from __future__ import annotations

import threading

from infra.bus import Record
from infra.roles.context import RoleContext
from infra.roles.refusing import refusal
from infra.runs import unique_name
from infra.sites.followed import Followed
from infra.sites.news import News
from infra.stores.store import Missing, StoreError
from infra.tail import Inbox, Tail
from infra.waiting import Wait
from infra.weights import spent
from infra.weights.copy import Copy
from infra.weights.expected import Expected
from infra.weights.folder import ModelFolder
from infra.weights.seen import Seen
from infra.weights.signing import Keys
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from producers.installing import Newest, VerifiedWeights
from schemas.messages import WeightsAnnouncement

_LOOK_S = 0.5


class WeightsWatch:
    """Gives the newest version that can be had, whenever there is a newer one, and rings `bell` then.

    One thread reads announcements, another one fetches: so the relay's messages are read while its chunks are
    awaited.
    """

    def __init__(self, context: RoleContext, bell: threading.Event) -> None:
        self._context, self._bell = context, bell
        news = News(context.run, refusal(context))
        self._followed = Followed(news, context.site.name if context.site else None)
        self._seen = Seen(unique_name(context.record)) if Keys.from_env().trusts else None
        self._closed, self._news = threading.Event(), threading.Event()
        base = ModelFolder(context.record.model)
        self._newest = Newest(context.spec.model, base, context.spec.generator)
        self._expected = Expected(context.spec.model, base)
        self._have = self._wanted = -1
        self._copy: Copy | None = None  # of the newest version; the next one is fetched as a delta
        self._failing: Wait | None = None
        self._came = Inbox[VerifiedWeights]()
        self._thread = threading.Thread(target=self._work, daemon=True, name="weights")

    def open(self) -> WeightsWatch:
        """Open the weights and the topic that announces them, and start the thread. Return itself."""
        self._weights = self._opened()
        reader = self._context.bus.reader(self._context.topics.weights, patient=True)
        self._tail = Tail(reader, self._hear, self._news).open()
        self._thread.start()
        return self

    def take(self) -> list[VerifiedWeights]:
        """Return the versions that came since the last call, without waiting. Raise what ended a thread."""
        self._tail.take()
        return self._came.take()

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._news.set()
        self._tail.close()
        self._thread.join()

    def _hear(self, records: list[Record]) -> list[None]:
        for record in records:
            self._followed.hear(record)
        return []

    def _work(self) -> None:
        try:
            while not self._closed.is_set():
                self._news.wait(_LOOK_S)
                self._news.clear()
                if (version := self._next()) is not None:
                    self._came.put(version)
                    self._news.set()  # there may be a newer one by now
                    self._bell.set()
        except Exception as error:  # whatever it is: the generator's own thread raises it
            self._came.put(error)
            self._bell.set()

    def _next(self) -> VerifiedWeights | None:
        """Fetch a newer version. Return None if there is none, or if fetching failed and is tried again."""
        wanted = self._followed.choose(self._have)
        if wanted is None:
            return None
        self._wanted = wanted.version
        try:
            self._check_age(wanted.version)
            with spent.counted():
                manifest, self._copy = self._weights.update(self._copy, wanted.version, root=wanted.root)
        except (StoreError, WeightsError) as error:
            if not self._closed.is_set():
                self._failed(wanted, error)
            return None
        self._have, self._failing = wanted.version, None
        if self._seen is not None:
            self._seen.remember(wanted.version)
        return self._newest.version(manifest, self._copy)

    def _check_age(self, version: int) -> None:
        """Raise if a version is older than one seen before; an old signature would still be good."""
        if self._seen is not None:
            self._seen.check(
                version, f"run {self._context.run}", f"If that is right, remove {self._seen.file}"
            )

    def _failed(self, wanted: WeightsAnnouncement, error: Exception) -> None:
        """Log that a version can't be had; the version before stays in use.

        If only this version is missing or damaged, the generator goes on without it. If the store fails, or
        there is no version yet, this raises WaitedTooLong after `deadlines.progress_s`.
        """
        of_version = isinstance(error, (Missing, WeightsError))
        if self._followed.set_aside(wanted) == 1 if of_version else self._failing is None:
            kept = f"weights {self._have} stay in use" if self._have >= 0 else "this generator has none yet"
            self._context.log.warning("weights %d can't be had, %s: %s", wanted.version, kept, error)
        if of_version and self._have >= 0:
            return  # the announcement may be false; the trainer waits for samples of a version that exists
        if self._failing is None:
            self._failing = Wait(
                f"weights {wanted.version} ({error})", unblocked_by="the object store",
                deadline_s=self._context.spec.deadlines.progress_s,
            )  # fmt: skip
        self._failing.check()

    def _opened(self) -> WeightStore:
        """Open the store of the run's weights; at a site, through the site's cache."""
        context = self._context
        if context.site is None:
            return WeightStore(context.store, context.run, check=self._expected.check)
        store = context.site.store(
            context.record, context.store, deadline_s=context.spec.deadlines.progress_s, stop=self._closed,
            may_fetch=lambda key: self._followed.may_fetch(self._wanted),
        )  # fmt: skip
        return WeightStore(store, context.run, near=store.near, check=self._expected.check)

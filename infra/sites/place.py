"""A site as its processes know it: its cache, and the way to the origin."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from infra.runs import RunRecord, unique_name
from infra.sites.origin import OriginStore
from infra.sites.site_store import SiteStore
from infra.stack.paths import StackPaths
from infra.stores.opening import open_store
from infra.stores.store import Store

_FILE = "file://"


@dataclass(frozen=True)
class Site:
    """Where a process is, if it is not where the object store is."""

    name: str
    cache: str  # URL; `local`: a folder of the machine that a process runs on
    share: tuple[int, int] = (0, 1)  # of a relay: its number among how many of the site

    def argv(self) -> list[str]:
        """How a process is told."""
        return ["--site", self.name, "--cache", self.cache, "--share", "{}/{}".format(*self.share)]

    def cache_of(self, record: RunRecord) -> str:
        """The URL of what it keeps of a run: another store's run of the same name has its own."""
        return cache_of(self.cache, record)

    def seen_by_others(self, record: RunRecord) -> str:
        """The same, if other sites can read it; else empty."""
        return "" if self.cache.startswith(_FILE) else self.cache_of(record)

    def store(
        self, record: RunRecord, origin: Store, *, deadline_s: float, stop: threading.Event,
        may_fetch: Callable[[str], bool] = lambda key: True,
    ) -> SiteStore:  # fmt: skip
        """The object store, as this site sees it."""
        spool = StackPaths.locate().home / "spool" / self.name
        far = OriginStore(origin, spool, deadline_s=deadline_s, stop=stop)
        return SiteStore(open_store(self.cache_of(record)), far, stop, may_fetch=may_fetch)

    @contextlib.contextmanager
    def opened(self, record: RunRecord, origin: Store, *, deadline_s: float) -> Iterator[SiteStore]:
        """The same for a while."""
        store = self.store(record, origin, deadline_s=deadline_s, stop=threading.Event())
        try:
            yield store
        finally:
            store.origin.close()


def cache_of(cache: str, record: RunRecord) -> str:
    """Where a cache keeps what is of a run."""
    return f"{cache.rstrip('/')}/{unique_name(record)}"


def site_of(name: str | None, cache: str, share: str = "0/1") -> Site | None:
    """The site that a command line names, if it does."""
    if not name:
        return None
    number, _, of = share.partition("/")
    folder = StackPaths.locate().home / "sites" / name
    return Site(name, f"{_FILE}{folder}" if cache == "local" else cache, (int(number), int(of)))

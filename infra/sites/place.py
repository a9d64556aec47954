"""A site as its processes know it: its cache, and the origin behind the cache."""

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
    """The site of a process that is not where the object store is."""

    name: str
    cache: str  # URL, or `local`: a folder of the machine that the process runs on
    share: tuple[int, int] = (0, 1)  # of a relay: its number among the site's relays, and how many there are

    def argv(self) -> list[str]:
        """Return the arguments that tell a process its site."""
        return ["--site", self.name, "--cache", self.cache, "--share", "{}/{}".format(*self.share)]

    def cache_of(self, record: RunRecord) -> str:
        """Return the URL of a run's part of the cache. Runs of one id in two stores have different parts."""
        return cache_of(self.cache, record)

    def seen_by_others(self, record: RunRecord) -> str:
        """Return the URL of a run's part of the cache if other sites can read it; else empty."""
        return "" if self.cache.startswith(_FILE) else self.cache_of(record)

    def store(
        self, record: RunRecord, origin: Store, *, deadline_s: float, stop: threading.Event,
        may_fetch: Callable[[str], bool] = lambda key: True,
    ) -> SiteStore:  # fmt: skip
        """Return the object store as this site sees it: the cache, with the origin behind it."""
        spool = StackPaths.locate().home / "spool" / self.name
        far = OriginStore(origin, spool, deadline_s=deadline_s, stop=stop)
        return SiteStore(open_store(self.cache_of(record)), far, stop, may_fetch=may_fetch)

    @contextlib.contextmanager
    def opened(self, record: RunRecord, origin: Store, *, deadline_s: float) -> Iterator[SiteStore]:
        """Give the object store as this site sees it, and close the origin after the block."""
        store = self.store(record, origin, deadline_s=deadline_s, stop=threading.Event())
        try:
            yield store
        finally:
            store.origin.close()


def cache_of(cache: str, record: RunRecord) -> str:
    """Return the URL of a run's part of a cache."""
    return f"{cache.rstrip('/')}/{unique_name(record)}"


def site_of(name: str | None, cache: str, share: str = "0/1") -> Site | None:
    """Return the site that a command line names; None if it names none."""
    if not name:
        return None
    number, _, of = share.partition("/")
    folder = StackPaths.locate().home / "sites" / name
    return Site(name, f"{_FILE}{folder}" if cache == "local" else cache, (int(number), int(of)))

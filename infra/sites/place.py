"""A site as its processes know it: its cache, and the way to the origin."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from infra.sites.origin import Origin
from infra.sites.site_store import SiteStore
from infra.stack.paths import StackPaths
from infra.store import Store, open_store

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

    @property
    def seen_by_others(self) -> str:
        """The cache's URL, if other sites can read it; else empty."""
        return "" if self.cache.startswith(_FILE) else self.cache

    def store(
        self, origin: Store, *, deadline_s: float, stop: threading.Event,
        may_fetch: Callable[[str], bool] = lambda key: True,
    ) -> SiteStore:  # fmt: skip
        """The object store, as this site sees it."""
        spool = StackPaths.locate().home / "spool" / self.name
        far = Origin(origin, spool, deadline_s=deadline_s, stop=stop)
        return SiteStore(open_store(self.cache), far, stop, may_fetch=may_fetch)

    @contextlib.contextmanager
    def opened(self, origin: Store, *, deadline_s: float) -> Iterator[SiteStore]:
        """The same for a while."""
        store = self.store(origin, deadline_s=deadline_s, stop=threading.Event())
        try:
            yield store
        finally:
            store.origin.close()


def site_of(name: str | None, cache: str, share: str = "0/1") -> Site | None:
    """The site that a command line names, if it does."""
    if not name:
        return None
    number, _, of = share.partition("/")
    folder = StackPaths.locate().home / "sites" / name
    return Site(name, f"{_FILE}{folder}" if cache == "local" else cache, (int(number), int(of)))

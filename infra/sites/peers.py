"""Fetches chunks from the caches of other sites, by a plan that is made anew for each version.

All relays plan by the same records: the reports that precede the announcement of the version on
`<run>.weights`. So each relay knows what the others will have, and nobody has to tell it. A chunk that does
not come as planned is fetched from the origin.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.sites.origin import OriginStore
from infra.stores.opening import open_store
from infra.stores.store import Missing, StoreError
from infra.waiting import WaitedTooLong
from infra.weights.manifest import Chunk
from infra.weights.spreading.links import Links
from infra.weights.weights_error import WeightsError
from schemas.messages import SiteReport, WeightsAnnouncement

if TYPE_CHECKING:
    from infra.weights.spreading.plan import Fetch

_log = logging.getLogger("streamrl.sites")

ORIGIN = "origin"
_RECENT_S = 60.0  # a site that was silent for longer takes no part
_FAILED_S = 60.0  # for so long a link is left out after it failed
_LATE_S = 2.0  # so late a chunk may be, at least ...
_TIMES = 2.0  # ... or it may take so many times as long as planned
_GIVE_UP_S = 5.0  # without a byte
_LOOK_S = 0.1


@dataclass(frozen=True)
class Heard:
    """An announcement, and the relays' reports that precede it."""

    announced: WeightsAnnouncement
    reports: tuple[SiteReport, ...]


def planned(heard: Heard, site: str, since: int, chunks: Sequence[Chunk]) -> Sequence[Fetch]:
    """Return a site's planned fetches in order, each with its source; none if there is no site to share with.

    `since`: the version that the relays have now; reports with another one are ignored.
    """
    recent = [r for r in heard.reports if heard.announced.announced_at - r.sent_at < _RECENT_S]
    equal = [report for report in recent if report.version == since]
    sites = {report.site for report in equal}
    if site not in sites or len(sites) < 2:
        return ()
    from infra.weights.spreading.plan import spread  # imports numba: a quarter second

    try:
        return spread(chunks, dict.fromkeys(sites, ()), ORIGIN, _links(equal)).fetches[site]
    except WeightsError:
        return ()  # no known link leads to one of the sites


def _links(reports: Sequence[SiteReport]) -> Links:
    """Return the links between sites. Rates of a site's relays add up; at 0 the link failed lately."""
    sources = {ORIGIN, *(report.site for report in reports if report.cache)}
    rates: dict[tuple[str, str], float] = defaultdict(float)
    for report in reports:
        for source, rate in report.rates.items():
            rates[source, report.site] += rate
    sites = sorted({report.site for report in reports})
    untried = [
        (source, site) for site in sites for source in sorted(sources)
        if source != site and (source, site) not in rates
    ]  # fmt: skip
    return Links({link: rate for link, rate in rates.items() if rate > 0 and link[0] in sources}, untried)


def warm_up_links() -> None:
    """Compile the planner's loops before a version waits for them."""
    from infra.weights.spreading.plan import spread

    links = {(ORIGIN, "a"): 1.0, (ORIGIN, "b"): 1.0, ("a", "b"): 1.0, ("b", "a"): 1.0}
    spread([Chunk(hash="0" * 64, size=1)], dict.fromkeys("ab", ()), ORIGIN, Links(links))


class Peers:
    """The caches of other sites, as one relay reads them."""

    def __init__(self, spool: Path, stop: threading.Event) -> None:
        self._spool, self._stop = spool, stop
        self._known: dict[str, tuple[str, OriginStore]] = {}
        self._failed: dict[str, float] = {}
        self._crossed = 0  # bytes that came from caches which a site has replaced
        self._unopened: dict[str, str] = {}

    def ways(self, heard: Heard, site: str, since: int, chunks: Sequence[Chunk]) -> dict[Chunk, Way]:
        """Return the way to each planned chunk of a version, in the order of the plan."""
        caches = {report.site: report.cache for report in heard.reports if report.cache}
        fetches, now = planned(heard, site, since, chunks), time.monotonic()
        named: dict[str, Chunk] = {chunk.hash: chunk for chunk in chunks}
        return {
            named[fetch.chunk]: Way(
                self, fetch.source, self._peer(fetch.source, caches.get(fetch.source, "")),
                not_before=now + fetch.not_before,
                until=now + max(_TIMES * fetch.arrives, fetch.arrives + _LATE_S),
            )
            for fetch in fetches
        }  # fmt: skip

    def _peer(self, site: str, cache: str) -> OriginStore | None:
        """Return another site's cache; None for the origin, and for a cache that can't be opened."""
        if not cache:
            return None
        if site not in self._known or self._known[site][0] != cache:
            try:
                store = open_store(cache)
            except Exception as error:  # what another site says must not stop this one
                if self._unopened.get(site) != cache:
                    _log.warning("the cache of site %s can't be opened: %s", site, error)
                self._unopened[site] = cache
                self.failed(site)
                return None
            if site in self._known:
                self._crossed += self._known[site][1].crossed
                self._known[site][1].close()
            self._known[site] = cache, OriginStore(store, self._spool, deadline_s=_GIVE_UP_S, stop=self._stop)
        return self._known[site][1]

    def failed(self, site: str) -> None:
        """Note that a chunk that was to come from a site did not come."""
        self._failed[site] = time.monotonic()

    @property
    def rates(self) -> dict[str, float]:
        """Bytes a second, by site; 0 for a site that failed lately."""
        measured = {site: far.rate for site, (_, far) in dict(self._known).items()}  # for another thread
        found = {site: rate for site, rate in measured.items() if rate}
        now = time.monotonic()
        return found | {site: 0.0 for site, at in dict(self._failed).items() if now - at < _FAILED_S}

    @property
    def crossed(self) -> int:
        """Bytes that came from other sites."""
        return self._crossed + sum(far.crossed for _, far in list(self._known.values()))

    def close(self) -> None:
        """Stop the threads of all caches."""
        for _, far in self._known.values():
            far.close()


@dataclass(frozen=True)
class Way:
    """The way to one chunk: from a site that may not have it yet, or from the origin."""

    peers: Peers
    site: str
    far: OriginStore | None  # None: the origin
    not_before: float  # monotonic: until then the site's uplink is left to others
    until: float  # monotonic: then the origin is asked

    def get(self, key: str, size: int | None, alive: Callable[[], None]) -> bytes | None:
        """Return the chunk if another site has it in time; else None."""
        while self.far is not None:
            try:
                return self.far.get(key, size, alive=alive)
            except Missing:
                if time.monotonic() < self.until:
                    alive()
                    time.sleep(_LOOK_S)
                    continue
            except Exception as error:  # whatever another site's cache does: the origin has the chunk
                if not isinstance(error, (StoreError, WaitedTooLong)):
                    _log.warning("%s could not be read from site %s: %r", key, self.site, error)
            self.peers.failed(self.site)
            return None
        return None

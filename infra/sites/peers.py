"""Other sites, from whose caches chunks may come: who gets what from where is planned anew for each version.

All relays plan by the same records: the reports that stand on `<run>.weights` before the announcement of the
version. So each knows what the others will have, and nobody has to tell them. A plan is a hope: what does not
come in time is fetched from the origin.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.sites.origin import OriginStore
from infra.stores.opening import open_store
from infra.stores.store import Missing, StoreError
from infra.waiting import WaitedTooLong
from infra.weights.manifest import Chunk
from infra.weights.spreading.links import Links
from infra.weights.spreading.plan import Fetch, spread
from infra.weights.weights_error import WeightsError
from schemas.messages import SiteReport, WeightsAnnouncement

_log = logging.getLogger("streamrl.sites")

ORIGIN = "origin"
_RECENT_S = 60.0  # a site that was not heard for so long takes no part
_FAILED_S = 60.0  # that a link is left out after it failed
_LATE_S = 2.0  # that a chunk may be late ...
_TIMES = 2.0  # ... and how many times as long as planned it may take
_GIVE_UP_S = 5.0  # without a byte
_LOOK_S = 0.1


@dataclass(frozen=True)
class Heard:
    """An announcement, and what relays had reported by then."""

    announced: WeightsAnnouncement
    reports: tuple[SiteReport, ...]


def planned(heard: Heard, site: str, since: int, chunks: Sequence[Chunk]) -> Sequence[Fetch]:
    """What a site fetches from where, in order; nothing if there is nobody to share with."""
    recent = [r for r in heard.reports if heard.announced.announced_at - r.sent_at < _RECENT_S]
    equal = [report for report in recent if report.version == since]
    sites = {report.site for report in equal}
    if site not in sites or len(sites) < 2:
        return ()
    try:
        return spread(chunks, dict.fromkeys(sites, ()), ORIGIN, _links(equal)).fetches[site]
    except WeightsError:
        return ()  # a site that nothing is known to lead to


def _links(reports: Sequence[SiteReport]) -> Links:
    """Relays of a site add up. A rate of 0 says that a link failed lately."""
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
    """Have the planner's loops compiled before a version waits for them."""
    links = {(ORIGIN, "a"): 1.0, (ORIGIN, "b"): 1.0, ("a", "b"): 1.0, ("b", "a"): 1.0}
    spread([Chunk(hash="0" * 64, size=1)], dict.fromkeys("ab", ()), ORIGIN, Links(links))


class Peers:
    """The caches of other sites, as one relay reads them."""

    def __init__(self, spool: Path, stop: threading.Event) -> None:
        self._spool, self._stop = spool, stop
        self._known: dict[str, tuple[str, OriginStore]] = {}
        self._failed: dict[str, float] = {}
        self._unopened: dict[str, str] = {}

    def ways(self, heard: Heard, site: str, since: int, chunks: Sequence[Chunk]) -> dict[Chunk, Way]:
        """To the chunks of a version, in the order of the plan."""
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
        """Another site's cache; None for the origin, and where the cache can't be opened."""
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
            self._known[site] = cache, OriginStore(store, self._spool, deadline_s=_GIVE_UP_S, stop=self._stop)
        return self._known[site][1]

    def failed(self, site: str) -> None:
        """What was to come from there did not."""
        self._failed[site] = time.monotonic()

    @property
    def rates(self) -> dict[str, float]:
        """Bytes a second by site; 0 of one that failed lately."""
        measured = {site: far.rate for site, (_, far) in self._known.items()}
        found = {site: rate for site, rate in measured.items() if rate}
        now = time.monotonic()
        return found | {site: 0.0 for site, at in self._failed.items() if now - at < _FAILED_S}

    @property
    def crossed(self) -> int:
        """Bytes that came from other sites."""
        return sum(far.crossed for _, far in self._known.values())

    def close(self) -> None:
        """Let go."""
        for _, far in self._known.values():
            far.close()


@dataclass(frozen=True)
class Way:
    """To one chunk, at a site that may not have it yet, or at the origin."""

    peers: Peers
    site: str
    far: OriginStore | None  # None: the origin
    not_before: float  # monotonic: until then a narrow uplink is left to others
    until: float  # monotonic

    def get(self, key: str, size: int | None, alive: Callable[[], None]) -> bytes | None:
        """The chunk, if another site has it in time."""
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

"""Chooses the version that a process takes next: the newest, or at a site the one that its relay fetches.

At a site the process takes chunks from the site's cache as they come. It fetches chunks itself only if the
relay has the version, or has passed it over, or has said nothing for 10 s though a newer version was
announced. While the relay is silent, the process takes the newest version, through the cache as well, so that
even then the bytes come to the site only once.
"""

from __future__ import annotations

import threading
import time

from infra.bus import Record
from infra.sites.candidates import Candidates
from infra.sites.news import News
from schemas.messages import SiteReport, WeightsAnnouncement

SILENCE_S = 10.0


class Followed:
    """Hears announcements and reports of relays, and chooses the version to take. Thread-safe."""

    def __init__(self, news: News, site: str | None = None, *, silence_s: float = SILENCE_S) -> None:
        self._news, self._site, self._silence_s = news, site, silence_s
        self._lock = threading.Lock()
        self._announced = Candidates[WeightsAnnouncement]()
        self._at_site = -1
        self._targets: dict[int, int] = {}  # the version that each relay fetches
        self._passed_over: dict[int, frozenset[int]] = {}  # and those that it could not have
        self._heard_at = time.monotonic()
        self._gone = site is None  # the relay is silent, or there is none

    def hear(self, record: Record) -> None:
        """Take in a record of `<run>.weights`."""
        found = self._news.of(record)
        with self._lock:
            if isinstance(found, WeightsAnnouncement):
                if self._newest <= self._at_site:
                    self._heard_at = time.monotonic()  # from now on the relay has something to say
                self._announced.add(found.version, found.root, found)
            elif found is not None and found.site == self._site:
                self._hear_relay(found)

    def _hear_relay(self, report: SiteReport) -> None:
        self._heard_at, self._gone = time.monotonic(), False
        self._at_site = max(self._at_site, report.version)
        self._targets[report.relay] = report.target
        self._passed_over[report.relay] = frozenset(report.passed_over)

    def choose(self, have: int) -> WeightsAnnouncement | None:
        """Return the announcement of the version to take, if it is newer than version `have`; else None."""
        with self._lock:
            under_way = max(self._targets.values(), default=-1)
            if not self._is_gone() and under_way > self._at_site:
                # the relay does not know newer ones yet
                return self._announced.newest(have, lambda version: version <= under_way)
            # versions that a relay passed over come last: reports are not signed, and must not block them all
            return self._announced.newest(have, self._may) or self._announced.newest(have)

    def set_aside(self, announced: WeightsAnnouncement) -> int:
        """Set a version aside for a while because it can't be had. Return how often it has failed by now."""
        with self._lock:
            return self._announced.failed(announced.version, announced.root)

    def may_fetch(self, version: int) -> bool:
        """Return whether this process may fetch chunks of a version that the site's cache lacks."""
        with self._lock:
            return version <= self._at_site or self._is_gone() or not self._may(version)

    def _may(self, version: int) -> bool:
        """Return whether no relay of the site has passed a version over; True while the relay is silent."""
        return self._gone or not any(version in passed for passed in self._passed_over.values())

    @property
    def _newest(self) -> int:
        found = self._announced.newest(-1, self._may)
        return found.version if found is not None else -1

    def _is_gone(self) -> bool:
        if self._newest > self._at_site and time.monotonic() - self._heard_at >= self._silence_s:
            self._gone = True
        return self._gone

"""Which version a process takes next: the newest, or at a site the one that its relay is at.

There it takes chunks out of the site's cache as they come, and fetches none itself, unless the relay has the
version, or says nothing for a while though there is something to say. Then the newest is taken until it is
heard again: through the cache as well, so that its bytes cross the way to the site once even then.
"""

from __future__ import annotations

import threading
import time

from infra.bus import Record
from schemas.messages import SiteReport, WeightsAnnouncement
from schemas.wire import Unreadable, decode

SILENCE_S = 10.0
_REMEMBERED = 64
_RELAYS = b"site/"


def relay_key(site: str, relay: int) -> str:
    """The key of a relay's reports."""
    return f"{_RELAYS.decode()}{site}/{relay}"


def announced(record: Record) -> WeightsAnnouncement | None:
    """What the trainer announces with a record of `<run>.weights`, if it is the trainer's."""
    return None if record.key.startswith(_RELAYS) else decode(record.value, WeightsAnnouncement)


def reported(record: Record) -> SiteReport | None:
    """What a relay reports with such a record, if it is a relay's that we understand."""
    if not record.key.startswith(_RELAYS):
        return None
    try:
        return decode(record.value, SiteReport)
    except Unreadable:
        return None  # of a newer relay: then the origin is followed


class Followed:
    """Hears what is announced and chooses. For several threads."""

    def __init__(self, site: str | None = None, *, silence_s: float = SILENCE_S) -> None:
        self._site, self._silence_s = site, silence_s
        self._lock = threading.Lock()
        self._announced: dict[int, WeightsAnnouncement] = {}
        self._at_site = -1
        self._targets: dict[int, int] = {}  # what each relay is at
        self._heard_at = time.monotonic()
        self._gone = site is None  # the relay

    def hear(self, record: Record) -> None:
        """A record of `<run>.weights`."""
        found, report = announced(record), reported(record)
        with self._lock:
            if found is not None:
                if self._newest <= self._at_site:
                    self._heard_at = time.monotonic()  # from now on the relay has something to say
                self._announced[found.version] = found
                for version in sorted(self._announced)[:-_REMEMBERED]:
                    del self._announced[version]
            elif report is not None and report.site == self._site:
                self._heard_at, self._gone = time.monotonic(), False
                self._at_site = max(self._at_site, report.version)
                self._targets[report.relay] = report.target

    def choose(self, have: int) -> WeightsAnnouncement | None:
        """What to take, if it is newer than what one has."""
        with self._lock:
            newest = self._newest
            under_way = max(self._targets.values(), default=-1)
            if not self._is_gone() and under_way > self._at_site:
                newest = under_way  # what comes behind it, the relay does not know yet
            return self._announced.get(newest) if newest > have else None

    def may_fetch(self, version: int) -> bool:
        """Whether one fetches of a version what is not in the site's cache."""
        with self._lock:
            return version <= self._at_site or self._is_gone()

    @property
    def _newest(self) -> int:
        return max(self._announced, default=-1)

    def _is_gone(self) -> bool:
        if self._newest > self._at_site and time.monotonic() - self._heard_at >= self._silence_s:
            self._gone = True
        return self._gone

"""Which version a process takes next: the newest, or at a site the newest that its relay has.

If the relay says nothing for a while, though there is something to say, the newest is taken until it is heard
again: through the site's cache as well, so that its bytes cross the way to the site once even then.
"""

from __future__ import annotations

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
    """Hears what is announced and chooses."""

    def __init__(self, site: str | None = None, *, silence_s: float = SILENCE_S) -> None:
        self._site, self._silence_s = site, silence_s
        self._announced: dict[int, WeightsAnnouncement] = {}
        self._at_site = -1
        self._heard_at = time.monotonic()
        self._gone = site is None  # the relay

    def hear(self, record: Record) -> None:
        """A record of `<run>.weights`."""
        found = announced(record)
        if found is not None:
            self._heard_at = time.monotonic()  # from now on it has something to say
            self._announced[found.version] = found
            for version in sorted(self._announced)[:-_REMEMBERED]:
                del self._announced[version]
            return
        report = reported(record)
        if report is not None and report.site == self._site:
            self._heard_at, self._gone = time.monotonic(), False
            self._at_site = max(self._at_site, report.version)

    def choose(self, have: int) -> WeightsAnnouncement | None:
        """What to take, if it is newer than what one has."""
        newest = max(self._announced, default=-1)
        if newest > self._at_site and time.monotonic() - self._heard_at >= self._silence_s:
            self._gone = True
        if not self._gone:
            newest = max((version for version in self._announced if version <= self._at_site), default=-1)
        return self._announced[newest] if newest > have else None

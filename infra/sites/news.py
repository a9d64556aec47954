"""Reads `<run>.weights`: the trainer's announcements of versions, and the reports of sites' relays.

All readers of the topic take its records through here. A record is refused if it can't be read, is of another
run, or is an announcement without a trusted signature; the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from infra.bus import Record
from infra.gate import Gate, Refuse, passed_over
from infra.weights.announcing import untrusted
from infra.weights.signing import Keys
from schemas.messages import SiteReport, WeightsAnnouncement

_RELAYS = b"site/"


def relay_key(site: str, relay: int) -> str:
    """Return the key of a relay's reports."""
    return f"{_RELAYS.decode()}{site}/{relay}"


class News:
    """Takes announcements and reports out of records."""

    def __init__(self, run: str, refuse: Refuse = passed_over, keys: Keys | None = None) -> None:
        believed = keys or Keys.from_env()
        unfit: Callable[[WeightsAnnouncement], str] = lambda said: untrusted(said, believed)  # noqa: E731
        self._announcements = Gate(WeightsAnnouncement, run, refuse, unfit=unfit)
        self._reports = Gate(
            SiteReport, run, passed_over
        )  # one in a newer format is ignored: then the origin is followed

    def of(self, record: Record) -> WeightsAnnouncement | SiteReport | None:
        """Return the announcement or report in a record; None if it was refused."""
        gate = self._reports if record.key.startswith(_RELAYS) else self._announcements
        return gate.take_one(record)

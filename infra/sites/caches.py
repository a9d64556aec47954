"""Decides which caches of other sites a relay reads: only those of sites that the run file names.

Anybody who may write to the topic can report a cache, and the relay opens it with this site's credentials. So
a cache must be where the run file says or, if that says `local`, in a store of a known kind.
"""

from __future__ import annotations

import logging

from msgspec import structs

from infra.runs import RunRecord
from infra.sites.peers import ORIGIN
from infra.sites.place import cache_of
from schemas.messages import SiteReport

_SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss")
_LOCAL = "local"


class Caches:
    """Checks reports by the run file. All relays of a run check alike, so all of them make the same plans."""

    def __init__(self, record: RunRecord, log: logging.Logger) -> None:
        self._record, self._log = record, log
        self._sites = record.spec.placement.sites
        self._said: set[str] = set()

    def allowed(self, report: SiteReport) -> SiteReport | None:
        """Return a report with what may be used of it; None if the run file does not name its site."""
        if report.site not in self._sites:
            if report.cache:
                self._warn(report.site, "the run file has no such site in placement.sites")
            return None
        cache = report.cache
        if cache and (why := self._wrong(report.site, cache)):
            self._warn(report.site, why)
            cache = ""
        rates = {
            source: rate for source, rate in report.rates.items()
            if (source == ORIGIN or source in self._sites) and rate >= 0
        }  # fmt: skip
        return structs.replace(report, cache=cache, rates=rates)

    def _wrong(self, site: str, cache: str) -> str:
        """Return why a cache must not be opened; empty if it may be."""
        planned = self._sites[site].cache
        if planned != _LOCAL:
            meant = cache_of(planned, self._record)
            return "" if cache == meant else f"by the run file its cache is {meant}, not {cache[:200]}"
        scheme, there, rest = cache.partition("://")
        if not there or scheme not in _SCHEMES or "::" in rest:
            return f"its cache is said to be at {cache[:200]}; one of {', '.join(_SCHEMES)} is expected"
        return ""

    def _warn(self, site: str, why: str) -> None:
        if site in self._said or len(self._said) > 64:
            return
        self._said.add(site)
        self._log.warning("nothing is read from site %s: %s", site[:64], why)

"""Whose caches a relay reads: those of sites that the run file names, where it says or where a store may be.

Reports come from anybody who may write to the topic, and a cache is opened with this site's credentials.
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
    """Judges reports by a run's file: all relays of a run judge them alike, and so they plan alike."""

    def __init__(self, record: RunRecord, log: logging.Logger) -> None:
        self._record, self._log = record, log
        self._sites = record.spec.placement.sites
        self._said: set[str] = set()

    def allowed(self, report: SiteReport) -> SiteReport | None:
        """A report as it may be planned with; None if it is of a site that the run file does not name."""
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
        """Why a cache is not opened."""
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

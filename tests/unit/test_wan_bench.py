"""What the bench of a far site makes of relays' reports: whoever was started again counts anew."""

from __future__ import annotations

from schemas.messages import SiteReport
from tests.bench._wan_sites import Seen
from tests.fakes.fill import fill


def report(version: int, target: int, crossed: int, relay: int = 0, site: str = "far") -> SiteReport:
    found: SiteReport = fill(
        SiteReport, run="r", site=site, relay=relay, version=version, target=target, crossed=crossed
    )
    return found


def crossed(version: int, *reports: SiteReport) -> int:
    seen = Seen(reports=list(reports))
    found = seen.at_site("far", version)
    assert found is not None
    return seen.crossed_for(found, version)


def test_bytes_are_counted_from_before_a_version_was_begun() -> None:
    assert crossed(2, report(1, -1, 100), report(1, 2, 130), report(1, 2, 180), report(2, -1, 200)) == 100
    assert crossed(2, report(1, -1, 100), report(1, -1, 500, site="near"), report(2, -1, 200)) == 100


def test_a_relay_that_was_started_again_counts_from_nothing() -> None:
    old = [report(1, -1, 5000), report(1, 2, 5600)]
    assert crossed(2, *old, report(-1, -1, 0), report(-1, 2, 300), report(2, -1, 5600)) == 5600
    assert crossed(2, *old, report(2, -1, 400)) == 400, "its first report was not heard"
    assert crossed(2, *old, report(-1, -1, 0, relay=1), report(2, -1, 5000, relay=1)) == 5000

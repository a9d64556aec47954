"""A relay brings each announced version to its site, verifies it, and reports that the site has it.

<run>.weights ──► the newest ──► mirror: origin ──► cache ──► verified ──► <run>.weights: the site has it
                                                                           how much is here, how late it is

waits for            unblocked by
the next weights     the trainer
chunks               the origin, or another relay of the site that fetches them
"""

from __future__ import annotations

import sys
import threading
import time
from functools import partial

from infra.bus import Record
from infra.errors import Explained
from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from infra.roles.refusing import refusal
from infra.sites.caches import Caches
from infra.sites.candidates import Candidates
from infra.sites.mirror import Mirror
from infra.sites.news import News, relay_key
from infra.sites.peers import ORIGIN, Heard, Peers, warm_up_links
from infra.sites.place import Site
from infra.sites.timed_reports import TimedReports
from infra.stores.store import Missing
from infra.tail import Tail
from infra.weights.manifest import VersionManifest
from infra.weights.weights_error import WeightsError
from schemas.messages import SiteReport, WeightsAnnouncement
from schemas.wire import encode

_BUSY_S, _IDLE_S = 1.0, 20.0  # between reports: while fetching, and otherwise
_LOOK_S = 0.2
_PAUSES_S = (1.0, 2.0, 5.0, 10.0)  # before the origin, or a version, is tried again
_MOST_REPORTS = 1024  # relays whose newest reports are kept
_NAMED = 64  # at most, of the versions that were passed over, in a report


class Relay:
    """One of a site's relays. It holds a copy of the model, to verify each version before it reports it."""

    def __init__(self, context: RoleContext, site: Site) -> None:
        self._context, self._site = context, site
        deadline_s = context.spec.deadlines.progress_s
        store = site.store(context.record, context.store, deadline_s=deadline_s, stop=context.stop)
        self._store, self._origin = store, store.origin
        self._peers = Peers(store.origin.spool, context.stop)
        self._news = News(context.run, refusal(context))
        self._caches = Caches(context.record, context.log)
        self._reports: dict[tuple[str, int], SiteReport] = {}  # newest, by site and relay
        self._mirror = Mirror(context.run, context.store, store, share=site.share)
        self._version, self._target, self._collected = -1, -1, -1
        self._lag_s, self._trouble = 0.0, ""
        self._untidy = ""  # the error that was logged last about a cache that can't be kept tidy
        self._candidates = Candidates[Heard](_PAUSES_S)
        self._bell = threading.Event()

    def run(self) -> None:
        """Bring versions until told to stop."""
        reader = self._context.bus.reader(self._context.topics.weights, patient=True)
        tail = Tail(reader, self._hear, self._bell).open()
        self._reporting = TimedReports(self._send, self._every_s, self._context.log).open()
        failures = 0
        try:
            while True:
                self._context.check_stop()
                for heard in tail.take():
                    self._candidates.add(heard.announced.version, heard.announced.root, heard)
                newest = self._candidates.newest(self._version)
                if newest is None:
                    self._context.heart.waiting("the next weights", unblocked_by="trainer", cause="weights")
                    self._bell.wait(_LOOK_S)
                    self._bell.clear()
                elif self._bring(newest):
                    failures = 0
                else:
                    self._context.stop.wait(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
                    failures += 1
        finally:
            self._reporting.close()
            tail.close()
            self._origin.close()
            self._peers.close()

    def _hear(self, records: list[Record]) -> list[Heard]:
        """Return the announcements, each with the reports before it, which are the same for every relay."""
        found = []
        for record in records:
            said = self._news.of(record)
            if isinstance(said, SiteReport):
                if (report := self._caches.allowed(said)) is not None:
                    self._reports.pop((report.site, report.relay), None)  # the newest one goes to the end
                    self._reports[report.site, report.relay] = report
                    for oldest in list(self._reports)[:-_MOST_REPORTS]:
                        del self._reports[oldest]
            elif said is not None:
                found.append(Heard(said, tuple(self._reports.values())))
        return found

    def _bring(self, heard: Heard) -> bool:
        """Bring a version. Return whether it came or was passed over; False: the origin can't be read."""
        context, wanted = self._context, heard.announced
        version = wanted.version
        context.heart.working(f"fetching weights {version}", cause="fetching weights")
        self._target, began, before = version, time.monotonic(), self._crossed
        self._reporting.soon()
        try:
            manifest = self._mirror.bring(
                version, wanted.root, partial(self._peers.ways, heard, self._site.name), wanted.content
            )
        except Explained as error:
            context.check_stop()
            return self._failed(wanted, error)
        self._version, self._target, self._trouble = version, -1, self._mirror.trouble
        self._lag_s = max(0.0, time.time() - wanted.announced_at)
        self._reporting.soon()
        context.log.info(
            "weights %d are here after %.1f s (%.2f MB), %.1f s after they were announced",
            version, time.monotonic() - began, (self._crossed - before) / 1e6, self._lag_s,
        )  # fmt: skip
        self._tidy(manifest)
        return True

    def _tidy(self, manifest: VersionManifest) -> None:
        """Make a keyframe and collect old versions. A cache that refuses costs bytes alone."""
        keep = self._context.spec.trainer.keep_weights
        try:
            self._mirror.make_keyframe(manifest)
            if manifest.version // keep > self._collected // keep:  # those between may be passed over
                self._collected = manifest.version
                self._mirror.collect(keep)
        except Explained as error:
            self._context.check_stop()
            if self._untidy != str(error):
                self._context.log.warning("the cache can't be kept tidy: %s", error)
            self._untidy = str(error)

    def _failed(self, wanted: WeightsAnnouncement, error: Explained) -> bool:
        """Note that a version did not come. Return whether the version itself is at fault."""
        self._trouble = str(error)
        of_version = isinstance(error, (Missing, WeightsError))
        times = self._candidates.failed(wanted.version, wanted.root) if of_version else 1
        if of_version:
            self._target = -1
        self._reporting.soon()
        if times == 1:
            self._context.log.warning("weights %d could not be fetched: %s", wanted.version, error)
        return of_version

    def _send(self) -> None:
        self._context.writer.send(
            self._context.topics.weights, encode(self._report()),
            key=relay_key(self._site.name, self._context.number),
        )  # fmt: skip

    def _every_s(self) -> float:
        return _IDLE_S if self._target < 0 else _BUSY_S

    @property
    def _crossed(self) -> int:
        return self._origin.crossed + self._peers.crossed

    def _report(self) -> SiteReport:
        rates = self._peers.rates | ({ORIGIN: self._origin.rate} if self._origin.rate else {})
        counters = self._context.heart.counters
        counters |= {"version": self._version, "crossed": self._crossed, "lag_s": self._lag_s}
        return SiteReport(
            run=self._context.run, site=self._site.name, relay=self._context.number, version=self._version,
            target=self._target, done=self._mirror.done, whole=self._mirror.whole, lag_s=self._lag_s,
            crossed=self._crossed, rates=rates,
            cache=self._site.seen_by_others(self._context.record), trouble=self._trouble_now(),
            sent_at=time.time(), passed_over=tuple(self._candidates.aside(self._version)[-_NAMED:]),
        )  # fmt: skip

    def _trouble_now(self) -> str:
        if self._origin.trouble or self._trouble:
            return self._origin.trouble or self._trouble
        return f"the cache does not work: {self._store.broken}" if self._store.broken else ""


def body(context: RoleContext) -> None:
    """Run a relay."""
    if context.site is None:
        raise Explained("a relay belongs to a site: start it with --site NAME and --cache URL")
    if len(context.spec.placement.sites) > 1:
        threading.Thread(target=_warm_up, args=(context,), daemon=True, name="planner").start()
    context.loaded()
    Relay(context, context.site).run()


def _warm_up(context: RoleContext) -> None:
    try:
        warm_up_links()
    except Exception as error:  # the first plan meets the same error
        context.log.warning("the planner could not be compiled: %s", error)


if __name__ == "__main__":
    sys.exit(run_role("relay", body))

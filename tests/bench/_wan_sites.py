"""The two sites of the wan bench: here a trainer's publisher, broker and store, there relays and readers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from consumers.learners.lending import made_of
from consumers.steps.publisher import Publisher
from infra import runs
from infra.roles.context import RoleContext
from infra.roles.heart import Heart
from infra.run_bus import connect
from infra.runs import RunRecord
from infra.sites.news import News
from infra.stack import local
from infra.stack.paths import StackPaths
from infra.stores.opening import open_store
from infra.tail import Tail
from infra.weights.versions import WeightStore
from schemas.messages import SiteReport, WeightsAnnouncement
from schemas.topics import Topics
from tests.bench._link import Link
from tests.factories import make_spec

ROOT = Path(__file__).parents[2]


@dataclass
class Seen:
    """What is heard of versions."""

    announced: dict[int, WeightsAnnouncement] = field(default_factory=dict)
    reports: list[SiteReport] = field(default_factory=list)

    def at_site(self, site: str, version: int) -> SiteReport | None:
        """The first report by which a site has a version."""
        return next((r for r in self.reports if r.site == site and r.version >= version), None)

    def crossed_for(self, report: SiteReport, version: int) -> int:
        """Bytes that a relay fetched of a version until a report: since what it told before it began with it.

        A relay that was started again counts from 0: what an earlier one of its number told says nothing.
        """
        before = 0
        for one in self.reports:
            if (one.site, one.relay) != (report.site, report.relay):
                continue
            if one is report:
                break
            if one.crossed < before:
                before = 0
            if one.version < version != one.target:
                before = one.crossed
        return report.crossed - (before if before <= report.crossed else 0)


class Near:
    """The trainer's side."""

    def __init__(self, folder: Path, link: Link, model: Path) -> None:
        self.folder, self.link = folder, link
        os.environ |= {"STREAMRL_LISTEN": link.near_address, "STREAMRL_HOME": str(folder / "near")}
        os.environ.setdefault("STREAMRL_CACHE", str(ROOT / ".streamrl"))
        paths = StackPaths.locate(folder / "near")
        stack = local.start_stack(kafka=True, s3=True, prefect=False, paths=paths)
        assert stack.s3 is not None and stack.bootstrap_servers is not None
        self.env = stack.s3.env()
        os.environ |= self.env
        store = open_store(f"{stack.s3.url}/wan")
        spec = make_spec(
            run="wan", model={"path": str(model), "dtype": "bfloat16"}, sampling={"max_tokens": 232},
            generator={"slots": 8, "kv_cache_mib": 128}, trainer={"microbatch_tokens": 256},
        )  # fmt: skip
        self.record: RunRecord = runs.create(
            store, spec, bootstrap_servers=stack.bootstrap_servers, model=str(model)
        )
        bus = connect(self.record, "wan")
        topics = Topics(self.record.id, spec.lengths.classes)
        bus.create_topics(topics.all())
        context = RoleContext(
            self.record, store, bus, topics, logging.getLogger("wan"), "trainer", 0, bus.writer(),
            Heart(self.record.id, "trainer", 0), threading.Event(),
        )  # fmt: skip
        self.store, self.seen = store, Seen()
        self._news = News(self.record.id)
        self._publisher = Publisher(context, 1).open()
        self._tail = Tail(bus.reader(topics.weights), self._hear, threading.Event()).open()

    def _hear(self, records: list[Any]) -> list[None]:
        for record in records:
            said = self._news.of(record)
            if isinstance(said, WeightsAnnouncement):
                self.seen.announced[said.version] = said
            elif said is not None:
                self.seen.reports.append(said)
        return []

    def publish(self, version: int, model: dict[str, torch.Tensor]) -> WeightsAnnouncement:
        """As a trainer does; returns when it is announced."""
        self._publisher.publish(version, made_of(model))
        self._publisher.drain()
        self.until(lambda: version in self.seen.announced, f"version {version} to be announced")
        return self.seen.announced[version]

    def sizes(self, version: int) -> int:
        """Bytes of the way to a version from the one before."""
        path = WeightStore(self.store, self.record.id).manifest(version).path(version - 1)
        assert path is not None
        return path.size

    def least(self, version: int) -> int:
        """Bytes of the shortest way to a version."""
        return min(path.size for path in WeightStore(self.store, self.record.id).manifest(version).paths)

    def until(self, true: Callable[[], object], what: str, deadline_s: float = 300.0) -> None:
        """Wait, but not for ever."""
        end = time.monotonic() + deadline_s
        while not true():
            self._tail.take()
            if time.monotonic() > end:
                raise RuntimeError(f"waited {deadline_s:.0f} s in vain for {what}")
            time.sleep(0.01)

    def close(self) -> None:
        """Nothing is left."""
        self._publisher.close()
        self._tail.close()


class Far:
    """Processes at the far site."""

    def __init__(self, near: Near, site: str) -> None:
        self.near, self.site = near, site
        self.home = near.folder / site
        self.home.mkdir()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, **env: str) -> None:
        """One of the run's processes."""
        words = [
            sys.executable, "-m", module, "--store", self.near.store.url, "--run", self.near.record.id,
            "--site", self.site, "--cache", f"file://{self.home}/cache",
            "--number", str(len(self.processes)),
        ]  # fmt: skip
        environment = {**os.environ, "STREAMRL_HOME": str(self.home), "PYTHONPATH": str(ROOT), **env}
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.near.link.at_far(words), env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
            )

    def relay(self, name: str = "relay") -> None:
        """Start a relay."""
        self.start(name, "infra.relay")

    def readers(self, name: str, count: int) -> None:
        """Start so many readers."""
        self.start(name, "tests.bench._wan_reader", READERS=str(count))

    def engine(self, name: str) -> None:
        """Start a reader with an engine that decodes."""
        self.start(name, "tests.bench._wan_engine")

    def read(self, name: str) -> list[dict[str, Any]]:
        """What readers have said so far."""
        found = []
        for line in (self.home / f"{name}.log").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [said for said in found if isinstance(said, dict)]

    def kill(self, name: str) -> None:
        """kill -9"""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """Nothing is left."""
        for name in list(self.processes):
            self.kill(name)


@contextmanager
def near_and_far(link: Link, model: Path) -> Iterator[Near]:
    """A near site, in a folder of its own. `model`: what it begins with."""
    with tempfile.TemporaryDirectory(prefix="streamrl-wan-") as folder:
        near: Near | None = None
        try:
            near = Near(Path(folder), link, model)
            yield near
        finally:
            if near is not None:
                near.close()
            local.stop_stack(paths=StackPaths.locate(Path(folder) / "near"))

"""Sites whose caches are buckets of a real S3 server: relays and readers share one, other sites read it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from infra.sites.mirror import Mirror
from infra.sites.origin import OriginStore
from infra.sites.peers import Heard, Peers
from infra.sites.site_store import SiteStore
from infra.stack.s3 import S3Access
from infra.stores.opening import open_store
from infra.stores.store import Store
from infra.weights.versions import WeightStore
from schemas.messages import SiteReport, WeightsAnnouncement
from tests.fakes.fill import fill

RUN = "count-1"


@pytest.fixture
def prefix(s3: S3Access, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    return f"{s3.url}/{uuid4().hex}"


class Site:
    """A cache, and relays of which each has a way of its own to the origin."""

    def __init__(self, prefix: str, name: str, folder: Path) -> None:
        self.name, self.cache, self._origin = name, f"{prefix}/{name}", open_store(f"{prefix}/origin")
        self._folder, self.origins = folder / name, list[OriginStore]()

    def store(self, **options: object) -> SiteStore:
        spool = self._folder / f"spool-{len(self.origins)}"
        self.origins.append(OriginStore(self._origin, spool, deadline_s=150.0))
        return SiteStore(open_store(self.cache), self.origins[-1], **options)  # type: ignore[arg-type]

    def relay(self, share: tuple[int, int]) -> Mirror:
        return Mirror(RUN, self._origin, self.store(), share=share)

    @property
    def crossed(self) -> int:
        return sum(origin.crossed for origin in self.origins)


def published(prefix: str) -> tuple[Store, list[str]]:
    """Two versions; of the second one little has changed."""
    origin = open_store(f"{prefix}/origin")
    weights, tensors = WeightStore(origin, RUN), {f"t{n}": torch.randn(1 << 20) for n in range(16)}
    roots = [weights.publish(0, tensors, trainer_epoch=1).root]
    tensors["t3"] = tensors["t3"].clone()
    tensors["t3"][::50] *= 1.0001
    return origin, [*roots, weights.publish(1, tensors, trainer_epoch=1).root]


def test_relays_and_readers_of_a_site_share_a_bucket(prefix: str, tmp_path: Path) -> None:
    origin, roots = published(prefix)
    site = Site(prefix, "far", tmp_path)
    relays = [site.relay((number, 2)) for number in range(2)]
    for version, since in ((0, None), (1, 0)):
        before = site.crossed
        with ThreadPoolExecutor(4) as pool:
            brought = [pool.submit(relay.bring, version, roots[version]) for relay in relays]
            readers = [WeightStore(site.store(may_fetch=lambda key: False), RUN) for _ in range(2)]
            read = [pool.submit(each.update, None, version, root=roots[version]) for each in readers]
            assert {one.result().root for one in brought} == {roots[version]}
            assert {one.result()[1].root for one in read} == {roots[version]}
        manifest = WeightStore(origin, RUN).manifest(version)
        path = manifest.path(since)
        assert path is not None
        beside = site.crossed - before - path.size
        assert 0 <= beside < 3 * len(manifest.raw), "more than the chunks, and a manifest for each relay"


def test_a_site_reads_another_one_s_bucket(prefix: str, tmp_path: Path) -> None:
    origin, roots = published(prefix)
    paris, lyon = Site(prefix, "paris", tmp_path), Site(prefix, "lyon", tmp_path)
    paris.relay((0, 1)).bring(0, roots[0])
    rates = {"paris": {"origin": 1e8}, "lyon": {"origin": 1e3, "paris": 1e8}}
    reports = [
        fill(SiteReport, site=site.name, version=-1, rates=rates[site.name], cache=site.cache, sent_at=99.0)
        for site in (paris, lyon)
    ]
    said = Heard(fill(WeightsAnnouncement, run=RUN, version=0, announced_at=100.0), tuple(reports))
    peers = Peers(tmp_path / "spool", threading.Event())
    assert lyon.relay((0, 1)).bring(0, roots[0], partial(peers.ways, said, "lyon")).root == roots[0]
    path = WeightStore(origin, RUN).manifest(0).path(None)
    assert path is not None
    assert peers.crossed == path.size
    assert lyon.crossed < path.size / 10

"""A site's cache: each byte comes once, whatever fails on the way, and nothing wrong is ever there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from infra.bus import Record
from infra.relay import Relay
from infra.sites import origin as origins
from infra.sites.candidates import Candidates
from infra.sites.claims import Claim, sweep_claims
from infra.sites.followed import Followed
from infra.sites.mirror import Mirror
from infra.sites.news import News, relay_key
from infra.sites.origin import OriginStore
from infra.sites.peers import Heard, Peers, planned
from infra.sites.place import cache_of
from infra.sites.site_store import SiteStore
from infra.stores.file_store import FileStore
from infra.stores.store import Missing, Store, StoreError
from infra.waiting import WaitedTooLong
from infra.weights.bits import Model
from infra.weights.codec import chunks
from infra.weights.copy import Copy
from infra.weights.manifest import Chunk
from infra.weights.series import KEYFRAME_AFTER
from infra.weights.spreading.plan import Fetch
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from schemas.messages import SiteReport, WeightsAnnouncement
from schemas.wire import decode, encode
from tests.factories import make_context, make_spec
from tests.fakes.far import FarStore
from tests.fakes.fill import fill
from tests.waiting import wait_until

RUN = "test-1"
SIZE = 1 << 18  # elements: a keyframe takes some parts


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(origins, "LARGEST_PART", 1 << 14)
    monkeypatch.setattr(origins, "SMALLEST_PART", 1 << 14)
    monkeypatch.setattr(origins, "_PAUSES_S", (0.001,))
    monkeypatch.setattr("infra.sites.site_store._LOOK_S", 0.002)
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))


def publish(store: Store, versions: range) -> list[str]:
    """A model of which a little changes from version to version; the roots."""
    weights, draw = WeightStore(store, RUN), np.random.default_rng(0)
    values = draw.standard_normal(SIZE).astype(np.float32)
    roots = []
    for version in range(versions.stop):
        values = values.copy()
        values[draw.integers(0, SIZE, SIZE // 100)] *= np.float32(1 + 2**-7)
        if version in versions:
            tensors = {"w": torch.from_numpy(values).to(torch.bfloat16)}
            roots.append(weights.publish(version, tensors, trainer_epoch=1).root)
    return roots


class Place:
    """A far store, and a site's cache in a folder."""

    def __init__(self, folder: Path, **far: object) -> None:
        self.folder = folder
        self.there = FileStore(f"file://{folder}/origin")
        self.far = FarStore(self.there.url, **far)
        self.cache = FileStore(f"file://{folder}/cache")

    def site(
        self, *, spool: str = "spool", deadline_s: float = 30.0, cache: Store | None = None
    ) -> SiteStore:
        return SiteStore(
            cache or self.cache, OriginStore(self.far, self.folder / spool, deadline_s=deadline_s)
        )

    def mirror(self, **options: object) -> Mirror:
        return Mirror(RUN, self.far, self.site(**options))  # type: ignore[arg-type]

    def chunks(self, version: int, since: int | None) -> int:
        """Bytes of one way to a version."""
        path = WeightStore(self.there, RUN).manifest(version).path(since)
        assert path is not None
        return path.size


def test_eight_readers_cost_what_one_costs(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(3))

    def read(number: int) -> str:
        site = place.site(spool=f"spool{number}")
        manifest, _ = WeightStore(site, RUN, near=site.near).update(None, 2, root=roots[2])
        return manifest.root

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(8))) == {roots[2]}
    assert max(place.far.chunks_read.values()) == 1
    assert place.far.bytes_of_chunks == place.chunks(0, None) + place.chunks(1, 0) + place.chunks(2, 1)


def test_what_the_cache_has_is_the_cheaper_way(tmp_path: Path) -> None:
    """The skip of eight versions is shorter than eight steps, but those are here already."""
    place = Place(tmp_path)
    roots = publish(place.there, range(9))
    mirror = place.mirror()
    for version, root in enumerate(roots):
        mirror.bring(version, root)
    before = place.far.bytes_of_chunks
    site = place.site()
    WeightStore(site, RUN, near=site.near).update(None, 8, root=roots[8])
    assert place.far.bytes_of_chunks == before


def test_two_relays_of_a_site_share_the_work(tmp_path: Path) -> None:
    place = Place(tmp_path, seconds=0.02)
    tensors = {f"t{n}": torch.randn(1 << 17) for n in range(12)}
    manifest = WeightStore(place.there, RUN).publish(0, tensors, trainer_epoch=1)
    mirrors = [
        Mirror(RUN, place.far, place.site(spool=f"s{number}"), share=(number, 2)) for number in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda mirror: mirror.bring(0, manifest.root), mirrors):
            assert found.root == manifest.root
    assert max(place.far.chunks_read.values()) == 1
    assert all(mirror.done == mirror.whole for mirror in mirrors)


def test_a_link_that_is_cut_costs_time_and_no_bytes(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(1))
    place.far.fail(lambda read: read % 3 != 0)  # two of three reads
    place.mirror().bring(0, roots[0])
    assert place.far.bytes_of_chunks == place.chunks(0, None)


def test_a_dead_relay_s_half_is_not_fetched_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(1))
    place.far.fail(lambda read: read > 6)
    with pytest.raises(WaitedTooLong, match="nothing came for"):
        place.mirror(deadline_s=0.05).bring(0, roots[0])
    place.far.fail(lambda read: False)
    place.mirror().bring(0, roots[0])
    assert place.far.bytes_of_chunks == place.chunks(0, None)


def test_who_died_at_an_object_is_replaced(tmp_path: Path) -> None:
    cache = FileStore(f"file://{tmp_path}")
    dead, next_one = Claim(cache, "x"), Claim(cache, "x", stale_s=0.05)
    assert dead.taken()
    wait_until(next_one.taken, what="the claim of the dead to be taken over")
    third = Claim(cache, "x", stale_s=0.05)
    assert not third.taken()
    next_one.release()
    assert third.taken()


def test_who_is_at_work_is_not_replaced(tmp_path: Path) -> None:
    cache = FileStore(f"file://{tmp_path}")
    alive, other = Claim(cache, "x", renew_s=0.0), Claim(cache, "x", stale_s=0.01)
    assert alive.taken()
    for _ in range(20):
        alive.renew()
        assert not other.taken()


def test_the_claims_of_the_dead_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if their objects came from elsewhere, so that nobody takes them over."""
    now = [1000.0]
    monkeypatch.setattr("infra.weights.notes.now", lambda: now[0])
    cache = FileStore(f"file://{tmp_path}")
    dead, alive = Claim(cache, "dead"), Claim(cache, "alive", renew_s=0.0)
    assert dead.taken() and alive.taken()
    for _ in range(3):
        sweep_claims(cache)
        assert cache.list("claims") == ["claims/alive", "claims/dead"]
        now[0] += 1500.0
        alive.renew()
    sweep_claims(cache)
    assert cache.list("claims") == ["claims/alive"]


def test_damage_in_the_cache_is_mended_and_at_the_origin_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(1))
    place.mirror().bring(0, roots[0])
    key = next(key for key in place.cache.list("runs") if "/chunks/" in key)
    place.cache.put(key, b"damaged")
    site = place.site()
    WeightStore(site, RUN).update(None, 0, root=roots[0])
    assert place.cache.get(key) == place.there.get(key)
    place.cache.delete(key)
    place.there.put(key, place.there.get(key)[:-1] + b"!")
    with pytest.raises(WeightsError, match=f"origin/{key} is damaged"):
        WeightStore(place.site(), RUN).update(None, 0, root=roots[0])
    assert not place.cache.exists(key)


class Full(FileStore):
    """A cache that takes nothing any more."""

    def put_new(self, key: str, data: bytes) -> None:
        raise StoreError(f"{self.url}/{key} can't be written: no space left on device")

    put = put_new


def test_a_full_cache_stops_nobody(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(2))
    site = place.site(cache=Full(place.cache.url))
    mirror = Mirror(RUN, place.far, site)
    assert mirror.bring(1, roots[1]).root == roots[1]
    assert "no space left" in site.broken


class ReadOnly(Full):
    """A cache that gives what it has, and neither takes nor removes anything."""

    def delete(self, key: str) -> None:
        raise StoreError(f"{self.url}/{key} can't be removed: read-only file system")


class Away(ReadOnly):
    """A cache that can't be reached."""

    def get(self, key: str, size: int | None = None) -> bytes:
        raise StoreError(f"{self.url} can't be reached")

    def list(self, prefix: str) -> list[str]:
        raise StoreError(f"{self.url} can't be reached")

    def exists(self, key: str) -> bool:
        raise StoreError(f"{self.url} can't be reached")


@pytest.mark.parametrize("kind", [ReadOnly, Away])
def test_a_cache_that_does_not_work_stops_nobody(kind: type[Full], tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(2))
    site = place.site(cache=kind(place.cache.url))
    assert Mirror(RUN, place.far, site).bring(1, roots[1]).root == roots[1]
    manifest, _ = WeightStore(site, RUN).update(None, 1, root=roots[1])
    assert manifest.root == roots[1] and site.broken


def test_a_manifest_that_is_damaged_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(2))
    place.mirror().bring(1, roots[1])
    place.cache.put(f"runs/{RUN}/weights/v000001/manifest.json", b"{")
    assert place.mirror().bring(1, roots[1]).root == roots[1]


def test_an_announcement_costs_no_more_manifests_however_far_it_is(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(1))
    mirror, asked = place.mirror(), list[int]()
    mirror.bring(0, roots[0])
    mirror._weights.find = asked.append  # type: ignore[assignment, method-assign]
    mirror._look_back(2**31 - 1)
    assert len(asked) == KEYFRAME_AFTER


def test_a_damaged_manifest_on_the_way_leaves_other_ways(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(7))
    weights = WeightStore(place.there, RUN)
    weights.add_keyframe(6)
    _, held = weights.update(None, 2, root=roots[2])
    place.there.put(f"runs/{RUN}/weights/v000004/manifest.json", b'{"version"')
    assert weights.update(None, 6, root=roots[6])[0].root == roots[6]
    assert weights.update(held, 6, root=roots[6])[0].root == roots[6]


def test_a_keyframe_that_came_later_is_seen_from_a_site(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(6))
    manifest, _ = WeightStore(place.there, RUN).add_keyframe(5)
    place.mirror().bring(5, roots[5])
    assert place.far.bytes_of_chunks == manifest.paths[-1].size


def test_what_the_origin_has_not_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Missing):
        WeightStore(Place(tmp_path).site(), RUN).manifest(0)


def test_a_keyframe_is_made_here_of_what_is_here(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(33))
    assert place.chunks(32, None)
    mirror = place.mirror()
    for version in (0, 8, 16, 24, 31, 32):
        manifest = mirror.bring(version, roots[version])
        mirror.make_keyframe(manifest)
    before = place.far.bytes_of_chunks
    place.cache.delete(f"runs/{RUN}/weights/v000031/manifest.json")
    site = place.site()
    late = WeightStore(site, RUN, near=site.near)
    assert [path.since for _, path in late.paths_to(late.manifest(32)) or []] == [None]
    late.update(None, 32, root=roots[32])
    assert place.far.bytes_of_chunks == before


def heard(place: Place, versions: int, **reports: dict[str, float]) -> Heard:
    """An announcement, and what relays reported before: of each site its rates."""
    return Heard(
        fill(WeightsAnnouncement, run=RUN, version=versions, announced_at=100.0),
        tuple(
            fill(
                SiteReport, site=site, version=versions - 1, rates=rates, sent_at=99.0,
                cache=f"file://{place.folder}/{site}",
            )
            for site, rates in reports.items()
        ),
    )  # fmt: skip


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each tensor."""

    def encode_each(old: Model | None, new: Model, *, threads: int = 1) -> Iterator[bytes]:
        for name, bits in new.items():
            yield from chunks.encode_model(old and {name: old[name]}, {name: bits}, threads=threads)

    monkeypatch.setattr("infra.weights.series.encode_model", encode_each)


def shared(place: Place, said: Heard, root: str, sites: tuple[str, ...]) -> list[Peers]:
    """Sites bring a version, all at once."""
    peers = {site: Peers(place.folder / f"spool-{site}", threading.Event()) for site in sites}

    def bring(site: str) -> None:
        cache = FileStore(f"file://{place.folder}/{site}")
        store = place.site(spool=f"spool-{site}", cache=cache)
        version = said.announced.version
        mirror = Mirror(RUN, place.far, store)
        assert mirror.bring(version, root, partial(peers[site].ways, said, site)).root == root
        assert WeightStore(cache, RUN).fetch(version, root=root)

    with ThreadPoolExecutor(len(sites)) as pool:
        list(pool.map(bring, sites))
    return list(peers.values())


@pytest.mark.usefixtures("many_chunks")
def test_sites_with_a_fast_link_fetch_half_each_and_swap(tmp_path: Path) -> None:
    place = Place(tmp_path, seconds=0.01)
    tensors = {f"t{number:02}": torch.randn(1 << 13) for number in range(24)}
    root = WeightStore(place.there, RUN).publish(0, tensors, trainer_epoch=1).root
    rates = {"a": {"origin": 1e5, "b": 1e7}, "b": {"origin": 1e5, "a": 1e7}}
    peers = shared(place, heard(place, 0, **rates), root, ("a", "b"))
    assert place.far.bytes_of_chunks == place.chunks(0, None)
    assert all(0.3 < each.crossed / place.chunks(0, None) < 0.7 for each in peers)


@pytest.mark.usefixtures("many_chunks")
def test_what_another_site_does_not_have_comes_from_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.sites.peers._LATE_S", 0.1)
    monkeypatch.setattr("infra.sites.peers._LOOK_S", 0.01)
    place = Place(tmp_path)
    tensors = {f"t{number:02}": torch.randn(1 << 13) for number in range(8)}
    root = WeightStore(place.there, RUN).publish(0, tensors, trainer_epoch=1).root
    rates = {"a": {"origin": 1e7, "gone": 1e8}, "gone": {"origin": 1e9}}
    (peers,) = shared(place, heard(place, 0, **rates), root, ("a",))
    assert place.far.bytes_of_chunks == place.chunks(0, None)
    assert peers.rates == {"gone": 0.0}


def test_an_uplink_is_left_to_others_for_as_long_as_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    (root,) = publish(place.there, range(1))

    def late(said: Heard, site: str, since: int, some: Sequence[Chunk]) -> list[Fetch]:
        return [Fetch(chunk.hash, "origin", not_before=0.3, arrives=0.4) for chunk in some]

    monkeypatch.setattr("infra.sites.peers.planned", late)
    began = time.monotonic()
    shared(place, heard(place, 0, a={"origin": 1.0}), root, ("a",))
    assert time.monotonic() - began >= 0.3
    assert place.far.bytes_of_chunks == place.chunks(0, None)


def test_who_is_behind_or_silent_is_not_planned_with(tmp_path: Path) -> None:
    chunk = Chunk(hash="c" * 64, size=1000)
    said = heard(Place(tmp_path), 5, a={"origin": 1.0, "b": 9.0}, b={"origin": 9.0})
    assert [fetch.source for fetch in planned(said, "a", 4, [chunk])] == ["b"]
    assert not planned(said, "a", 3, [chunk])
    late = [structs.replace(r, sent_at=-99.0) if r.site == "b" else r for r in said.reports]
    assert not planned(Heard(said.announced, tuple(late)), "a", 4, [chunk])


def announcement(version: int, root: str = "") -> bytes:
    return encode(fill(WeightsAnnouncement, run=RUN, version=version, root=root))


def report(version: int, site: str = "far", target: int = -1) -> bytes:
    return encode(fill(SiteReport, run=RUN, site=site, version=version, target=target, rates={}))


def test_at_a_site_one_takes_what_its_relay_is_at(tmp_path: Path) -> None:
    context = make_context(make_spec(), tmp_path)
    topic, reader = context.topics.weights, context.bus.reader(context.topics.weights)
    news = News(RUN)
    near, far, alone = Followed(news), Followed(news, "far"), Followed(news, "far", silence_s=0.0)

    def hear(value: bytes, key: str) -> None:
        context.writer.send(topic, value, key=key)
        for record in reader.poll(1.0):
            for each in (near, far, alone):
                each.hear(record)

    def chosen(followed: Followed, have: int = -1) -> int | None:
        found = followed.choose(have)
        return found.version if found else None

    for version in range(3):
        hear(announcement(version), "newest")
    assert [chosen(each) for each in (near, far, alone)] == [2, 2, 2]
    assert [each.may_fetch(2) for each in (near, far, alone)] == [True, False, True]
    hear(report(2, "elsewhere"), relay_key("elsewhere", 1))
    assert not far.may_fetch(0)
    hear(report(0, target=1), relay_key("far", 0))
    assert (chosen(near), chosen(far), chosen(far, 1)) == (2, 1, None)
    assert (far.may_fetch(0), far.may_fetch(1)) == (True, False)
    hear(b"of a newer relay", relay_key("far", 0))
    hear(report(1), relay_key("far", 0))
    assert (chosen(far, 1), far.may_fetch(1), far.may_fetch(2)) == (2, True, False)


def test_a_relay_that_died_is_not_waited_for_because_there_is_ever_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr("infra.sites.followed.time.monotonic", lambda: clock)
    followed = Followed(News(RUN), "far")

    def hear(value: bytes, key: bytes = b"newest") -> None:
        followed.hear(Record("weights", 0, 0, key, value))

    hear(report(0), relay_key("far", 0).encode())
    for version in range(5):
        clock += 4.0
        hear(announcement(version))
    assert followed.may_fetch(4), "version 1 was announced twelve seconds ago"
    hear(report(0, target=4), relay_key("far", 0).encode())
    assert not followed.may_fetch(4)


def test_a_manifest_that_was_announced_is_not_fetched(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(2))
    told = WeightStore(place.there, RUN).manifest(1).packed
    mirror = place.mirror()
    mirror.bring(0, roots[0])
    place.far.missing = WeightStore(place.there, RUN).manifest_key(1)
    mirror.bring(1, roots[1], told=told)
    for wrong, why in ((told, "version 1"), (b"nonsense", "packed wrongly")):
        with pytest.raises(WeightsError, match=why):
            mirror.bring(2, roots[1], told=wrong)


def test_a_false_manifest_that_was_announced_spoils_no_cache(tmp_path: Path) -> None:
    """Without keys anybody can announce one: the true one is taken as soon as it is announced."""
    place = Place(tmp_path)
    roots = publish(place.there, range(2))
    liar = WeightStore(FileStore(f"file://{tmp_path}/liar"), RUN)
    false = [liar.publish(version, {"w": torch.zeros(4)}, trainer_epoch=1) for version in range(3)][1:]
    mirror = place.mirror()
    mirror.bring(0, roots[0])
    for said in false:
        with pytest.raises((WeightsError, Missing)):
            mirror.bring(said.version, said.root, told=said.packed)
        assert not place.cache.exists(liar.manifest_key(said.version))
    place.cache.put(liar.manifest_key(1), false[0].raw)
    assert mirror.bring(1, roots[1]).root == roots[1]
    assert WeightStore(place.site(), RUN).manifest(1).root == roots[1]


def test_what_the_relay_brings_is_waited_for(tmp_path: Path) -> None:
    """Eight readers begin before there is anything: not one fetches anything itself."""
    place = Place(tmp_path)
    roots = publish(place.there, range(2))
    own = FarStore(place.there.url)

    def read(number: int) -> Copy:
        origin = OriginStore(own, tmp_path / f"spool-{number}", deadline_s=30.0)
        site = SiteStore(place.cache, origin, may_fetch=lambda key: False)
        return WeightStore(site, RUN).update(None, 1, root=roots[1])[1]

    with ThreadPoolExecutor(8) as readers:
        read_by = [readers.submit(read, number) for number in range(8)]
        place.mirror().bring(1, roots[1])
        assert {copy.result().root for copy in read_by} == {roots[1]}
    assert not own.bytes_of_chunks
    assert place.far.bytes_of_chunks == place.chunks(0, None) + place.chunks(1, 0)


def test_of_a_manifest_that_is_too_large_no_more_is_brought_than_one_may_have(tmp_path: Path) -> None:
    place, key = Place(tmp_path), f"runs/{RUN}/weights/v000000/manifest.json"
    place.there.put(key, bytes(50_000))
    site = place.site()
    assert len(site.get(key, 1000)) == 1001
    assert site.origin.crossed == 1001


def test_who_waits_for_a_relay_can_be_told_to_stop(tmp_path: Path) -> None:
    place, stop = Place(tmp_path), threading.Event()
    publish(place.there, range(1))
    site = SiteStore(
        place.cache,
        OriginStore(place.far, tmp_path / "spool", deadline_s=30.0),
        stop,
        may_fetch=lambda key: False,
    )
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(StoreError, match="told to stop while"):
        WeightStore(site, RUN).update(None, 0)


@contextmanager
def working(relay: Relay, stop: threading.Event) -> Iterator[None]:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            relay.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert [type(error).__name__ for error in failed] == ["Stopped"]


def test_a_relay_says_what_its_site_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infra.sites.place import Site

    monkeypatch.setattr("infra.relay._PAUSES_S", (0.01,))
    context = make_context(make_spec(), tmp_path, run=RUN)
    roots = publish(context.store, range(3))
    reader = context.bus.reader(context.topics.weights)

    def announce(version: int, root: str) -> None:
        context.writer.send(context.topics.weights, announcement(version, root), key="newest")

    seen: list[SiteReport] = []

    def said(true: Callable[[SiteReport], object]) -> Callable[[], bool]:
        def look() -> bool:
            found = [r for r in reader.poll(0.01) if r.key.startswith(b"site/far/")]
            seen.extend(decode(record.value, SiteReport) for record in found)
            return any(true(each) for each in seen)

        return look

    relay = Relay(context, Site("far", f"file://{tmp_path}/cache"))
    with working(relay, context.stop):
        announce(0, roots[0])
        wait_until(said(lambda r: r.version == 0), what="version 0 at the site")
        announce(1, "another root")
        wait_until(said(lambda r: "another root"[:12] in r.trouble), what="trouble with version 1")
        assert max(each.version for each in seen) == 0
        announce(2, roots[2])
        wait_until(said(lambda r: r.version == 2 and not r.trouble), what="version 2 at the site")
    cache = FileStore(cache_of(f"file://{tmp_path}/cache", context.record))
    assert WeightStore(cache, RUN).fetch(2, root=roots[2])
    assert seen[-1].rates["origin"] > 0


def test_a_relay_that_passes_versions_over_keeps_its_cache_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infra.sites.place import Site

    context = make_context(make_spec(trainer={"keep_weights": 4}), tmp_path, run=RUN)
    roots = publish(context.store, range(12))
    relay = Relay(context, Site("far", f"file://{tmp_path}/cache"))
    collected: list[int] = []
    monkeypatch.setattr(relay._mirror, "collect", lambda keep: collected.append(relay._version))
    with working(relay, context.stop):
        for version in range(1, 12, 2):  # it takes as long to fetch one as the trainer to publish two
            context.writer.send(context.topics.weights, announcement(version, roots[version]), key="newest")
            wait_until(lambda version=version: relay._version == version, what="it")  # type: ignore[misc]
    assert collected == [1, 5, 9]


def test_leftovers_of_killed_writes_go_from_a_site_s_cache(tmp_path: Path) -> None:
    place = Place(tmp_path)
    roots = publish(place.there, range(1))
    mirror = place.mirror()
    mirror.bring(0, roots[0])
    chunk = next((tmp_path / "cache").rglob("chunks/*"))
    old, new = (chunk.with_name(f".{name}.{'0' * 32}.tmp") for name in ("old", "new"))
    for file in (old, new):
        file.write_bytes(b"half a chunk")
    os.utime(old, (time.time() - 7200,) * 2)
    spool = mirror._site.origin.spool
    parts = [spool / "old" / "0", spool / "new" / "0"]
    for part in parts:
        part.parent.mkdir(parents=True)
        part.write_bytes(b"a part")
    os.utime(parts[0].parent, (time.time() - 25 * 3600,) * 2)
    mirror.collect(1)
    assert not old.exists()
    assert new.exists(), "its writer may be at work"
    assert os.listdir(spool) == ["new"], "the chunk of the other came from elsewhere"


def test_a_relay_s_reports_are_made_while_versions_come() -> None:
    announced = Candidates[int]()

    class Interrupted:
        """An entry at which the thread that hears announcements has its turn."""

        @property
        def failures(self) -> int:
            announced.add(2, "root", 2)
            return 1

    announced.add(1, "root", 1)
    announced._entries[1, "root"] = Interrupted()  # type: ignore[assignment]
    assert announced.aside(-1) == [1]

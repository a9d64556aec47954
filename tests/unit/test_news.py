"""`<run>.weights` when others write to it: garbage, other runs, versions that are nowhere, false caches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from infra.bus import Record, read_all
from infra.relay import Relay
from infra.roles.context import RoleContext, Stopped
from infra.runs import unique_name
from infra.sites.caches import Caches
from infra.sites.candidates import Candidates
from infra.sites.followed import Followed
from infra.sites.mirror import Mirror
from infra.sites.news import News, relay_key
from infra.sites.origin import OriginStore
from infra.sites.peers import Heard, Peers
from infra.sites.place import Site, cache_of
from infra.sites.site_store import SiteStore
from infra.stores.file_store import FileStore
from infra.stores.store import StoreError
from infra.weights.announcing import signed
from infra.weights.manifest import Chunk
from infra.weights.signing import Keys
from infra.weights.versions import WeightStore
from producers.weights_watch import WeightsWatch
from schemas.messages import DeadLetter, SiteReport, WeightsAnnouncement
from schemas.wire import decode, encode
from tests.factories import make_context, make_spec
from tests.fakes.fill import fill
from tests.waiting import wait_until

RUN = "test-1"
ABSURD = 2**31 - 1


def announcement(version: int, root: str = "00", run: str = RUN, **more: Any) -> WeightsAnnouncement:
    found: WeightsAnnouncement = fill(
        WeightsAnnouncement, run=run, version=version, root=root, announced_at=1.0, **more
    )
    return found


def publish(context: RoleContext, version: int, keys: Keys | None = None) -> str:
    """A version, announced."""
    weights = WeightStore(context.store, context.run, keys=keys)
    root = weights.publish(version, {"w": torch.full((8,), float(version))}, trainer_epoch=1).root
    send(context, encode(signed(announcement(version, root), keys)))
    return root


def send(context: RoleContext, value: bytes, key: str = "newest") -> None:
    context.writer.send(context.topics.weights, value, key=key)


def spoil(context: RoleContext) -> None:
    """All that may stand on the topic and is of no use."""
    send(context, b"garbage")
    send(context, b"\xff" * 40)
    send(context, encode(announcement(5, run="another-1")))
    send(context, encode(announcement(ABSURD)))
    send(context, encode(announcement(0, "ff" * 16)))
    send(context, b"garbage", relay_key("far", 0))
    send(context, encode(fill(SiteReport, run="another-1", site="far", target=ABSURD)), relay_key("far", 1))


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoleContext:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    return make_context(make_spec(deadlines={"progress_s": 2}), tmp_path, role="generator", run=RUN)


@contextmanager
def watching(context: RoleContext) -> Iterator[Callable[[int], Callable[[], bool]]]:
    """A watch, and whether it has come to a version."""
    watch, taken = WeightsWatch(context, threading.Event()).open(), list[int]()

    def come_to(version: int) -> Callable[[], bool]:
        def true() -> bool:
            taken.extend(found.version for found in watch.take())
            return version in taken

        return true

    try:
        yield come_to
    finally:
        watch.close()
    assert taken == sorted(taken), "it never goes back"


def test_garbage_other_runs_and_absurd_versions_cost_a_generator_nothing(context: RoleContext) -> None:
    publish(context, 0)
    spoil(context)
    with watching(context) as come_to:
        wait_until(come_to(0), what="the version that is there")
        spoil(context)
        publish(context, 1)
        wait_until(come_to(1), what="the next version")
    letters = [
        decode(record.value, DeadLetter)
        for record in read_all(context.bus, context.topics.dead, deadline_s=1.0)
    ]
    assert {"it is of run another-1"} <= {letter.reason for letter in letters}
    assert {letter.topic for letter in letters} == {context.topics.weights.name}


def test_what_can_t_be_had_ends_no_generator_that_has_weights(
    context: RoleContext, caplog: pytest.LogCaptureFixture
) -> None:
    """Far longer than the deadline for progress."""
    context.spec.deadlines.__dict__["progress_s"] = 0.05
    publish(context, 0)
    with watching(context) as come_to:
        wait_until(come_to(0), what="the first version")
        send(context, encode(announcement(ABSURD)))
        wait_until(lambda: caplog.text.count(f"weights {ABSURD} can't be had") == 1, what="the warning")
        publish(context, 1)
        wait_until(come_to(1), what="the next version")


def test_versions_that_can_t_be_had_are_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("infra.sites.candidates.time.monotonic", lambda: clock)
    candidates = Candidates[str]()
    candidates.add(3, "a", "three")
    candidates.add(9, "b", "nine")
    assert candidates.newest(-1) == "nine"
    for pause_s in (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 60.0):
        candidates.failed(9, "b")
        candidates.add(9, "b", "nine")  # said again, it is no more likely to be there
        assert candidates.newest(-1) == "three" and candidates.newest(3) is None
        assert candidates.aside(-1) == [9]
        clock += pause_s
        assert candidates.newest(-1) == "nine"
    candidates.add(9, "c", "another nine")
    assert candidates.newest(-1) == "another nine" and candidates.aside(-1) == []


def test_a_flood_of_versions_does_not_hide_what_comes_next() -> None:
    candidates = Candidates[int]()
    for number in range(10_000):
        candidates.add(ABSURD - number, "x", -1)
    assert len(candidates._entries) <= 64
    candidates.add(7, "r", 7)
    for _ in range(64):
        if candidates.newest(-1) == -1:
            (version, root), _entry = max(
                ((key, entry) for key, entry in candidates._entries.items() if not entry.failures),
                key=lambda one: one[0],
            )
            candidates.failed(version, root)
    assert candidates.newest(-1) == 7


def test_what_a_relay_passes_over_is_not_waited_for() -> None:
    followed = Followed(News(RUN), "far")

    def hear(value: bytes, key: bytes = b"newest") -> None:
        followed.hear(Record("weights", 0, 0, key, value))

    def report(**fields: Any) -> bytes:
        return encode(fill(SiteReport, run=RUN, site="far", **{"target": -1, **fields}))

    key = relay_key("far", 0).encode()
    hear(encode(announcement(3)))
    hear(encode(announcement(ABSURD)))
    hear(report(version=2, target=ABSURD), key)
    found = followed.choose(2)
    assert found is not None and found.version == ABSURD and not followed.may_fetch(ABSURD)
    hear(report(version=2, passed_over=(ABSURD,)), key)
    found = followed.choose(2)
    assert found is not None and found.version == 3
    assert followed.may_fetch(ABSURD), "whoever waits for it finds out by itself"
    hear(report(version=2, target=ABSURD - 5, passed_over=(ABSURD,)), key)
    assert followed.choose(2) is not None, "a target that nobody has announced stalls nobody"
    hear(report(version=2, passed_over=(3, ABSURD)), key)
    found = followed.choose(2)
    assert found is not None and followed.may_fetch(found.version), "a false report holds nothing back"
    followed.set_aside(found)
    found = followed.choose(2)
    assert found is not None and found.version == 3


def test_announcements_that_nobody_trusted_has_signed_are_refused(key_files: dict[str, str]) -> None:
    own, other = (Keys(key_files[name], []) for name in ("own", "other"))
    refused: list[str] = []
    believes = Keys(None, [key_files["own.pub"]])
    news = News(RUN, lambda record, reason: refused.append(reason), believes)

    def heard(said: WeightsAnnouncement) -> bool:
        return news.of(Record("weights", 0, 0, b"newest", encode(said))) is not None

    true = signed(announcement(3, "r", content=b"manifest"), own)
    assert heard(true)
    lies: list[dict[str, Any]] = [
        {"version": 4},
        {"root": "s"},
        {"content": b"another"},
        {"announced_at": 2.0},
    ]
    assert not any(heard(structs.replace(true, **lie)) for lie in lies)
    assert not heard(announcement(3, "r")) and not heard(signed(announcement(3, "r"), other))
    assert "is signed by none of the keys" in refused[0] and "is not signed" in refused[4]
    assert News(RUN).of(Record("weights", 0, 0, b"newest", encode(true))) is not None


def test_a_generator_with_keys_takes_signed_announcements_alone(
    context: RoleContext, key_files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_TRUSTED_KEYS", key_files["own.pub"])
    own = Keys(key_files["own"], [key_files["own.pub"]])
    publish(context, 0, own)
    root = WeightStore(context.store, RUN, keys=own).publish(
        1, {"w": torch.full((8,), 5.0)}, trainer_epoch=1
    ).root  # fmt: skip
    send(context, encode(announcement(1, root)))
    with watching(context) as come_to:
        wait_until(come_to(0), what="the signed one")
        publish(context, 2, own)
        wait_until(come_to(2), what="the next signed one")
        assert not come_to(1)()


def test_with_keys_the_next_generator_does_not_go_back_either(
    context: RoleContext,
    key_files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An old announcement stays signed: whoever says it again leads nobody back."""
    monkeypatch.setenv("STREAMRL_TRUSTED_KEYS", key_files["own.pub"])
    own = Keys(key_files["own"], [key_files["own.pub"]])
    root = publish(context, 0, own)
    publish(context, 1, own)
    with watching(context) as come_to:
        wait_until(come_to(1), what="the newest version")
    context.bus.log(context.topics.weights)[0].clear()  # type: ignore[attr-defined]
    send(context, encode(signed(announcement(0, root), own)))
    with watching(context) as come_to:
        wait_until(lambda: "version 1 was verified on this machine" in caplog.text, what="the refusal")
        publish(context, 2, own)
        wait_until(come_to(2), what="a newer one")
        assert not come_to(0)()


def in_thread(relay: Relay, context: RoleContext) -> threading.Thread:
    def run() -> None:
        with pytest.raises(Stopped):
            relay.run()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_garbage_other_runs_and_absurd_versions_cost_a_relay_nothing(
    context: RoleContext, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    reader, said = context.bus.reader(context.topics.weights), list[SiteReport]()

    def there(version: int) -> Callable[[], bool]:
        def true() -> bool:
            news = (News(RUN).of(record) for record in reader.poll(0.01))
            said.extend(one for one in news if isinstance(one, SiteReport))
            return any(one.version == version for one in said)

        return true

    publish(context, 0)
    spoil(context)
    thread = in_thread(Relay(context, Site("far", f"file://{tmp_path}/cache")), context)
    try:
        wait_until(there(0), what="the version that is there")
        spoil(context)
        publish(context, 1)
        wait_until(there(1), what="the next version")
    finally:
        context.stop.set()
        thread.join()
    assert ABSURD in said[-1].passed_over
    assert f"weights {ABSURD} could not be fetched" in caplog.text
    assert (tmp_path / "cache" / unique_name(context.record) / "runs" / RUN).is_dir()


def test_a_report_that_can_t_be_sent_ends_no_relay(
    context: RoleContext, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.relay._IDLE_S", 0.01)
    errors: list[Exception] = [ValueError("nobody has foreseen")] * 3
    plain = Relay._send

    def send_(self: Relay) -> None:
        if errors:
            raise errors.pop()
        plain(self)

    monkeypatch.setattr(Relay, "_send", send_)
    reader = context.bus.reader(context.topics.weights)
    thread = in_thread(Relay(context, Site("far", f"file://{tmp_path}/cache")), context)
    try:
        wait_until(lambda: any(r.key.startswith(b"site/") for r in reader.poll(0.01)), what="a report")
    finally:
        context.stop.set()
        thread.join()
    assert caplog.text.count("a report could not be sent") == 1 and "nobody has foreseen" in caplog.text


def test_a_cache_that_refuses_keyframes_ends_no_relay(
    context: RoleContext, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Mirror, manifest: object) -> None:
        raise StoreError("no space left on device")

    monkeypatch.setattr(Mirror, "make_keyframe", full)
    reader, news = context.bus.reader(context.topics.weights), News(RUN)

    def there(version: int) -> bool:
        reports = (news.of(record) for record in reader.poll(0.01))
        return any(isinstance(one, SiteReport) and one.version == version for one in reports)

    thread = in_thread(Relay(context, Site("far", f"file://{tmp_path}/cache")), context)
    try:
        for version in range(3):
            publish(context, version)
            wait_until(lambda version=version: there(version), what=f"version {version}")
    finally:
        context.stop.set()
        thread.join()
    assert caplog.text.count("the cache can't be kept tidy: no space left on device") == 1


class Broken(FileStore):
    """A cache that fails as nobody has foreseen."""

    def exists(self, key: str) -> bool:
        if "/chunks/" in key and threading.current_thread().name.startswith("ThreadPool"):
            raise ValueError("nobody has foreseen")
        return super().exists(key)


def test_what_a_mirror_s_threads_meet_is_told_and_nobody_waits_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin = FileStore(f"file://{tmp_path}/origin")
    root = WeightStore(origin, RUN).publish(0, {"w": torch.ones(4)}, trainer_epoch=1).root
    site = SiteStore(
        Broken(f"file://{tmp_path}/cache"), OriginStore(origin, tmp_path / "spool", deadline_s=5.0)
    )
    mirror, found = Mirror(RUN, origin, site), list[str]()
    thread = threading.Thread(target=lambda: found.append(mirror.bring(0, root).root), daemon=True)
    thread.start()
    wait_until(lambda: found == [root], what="the version, without the thread that failed")
    assert "nobody has foreseen" in mirror.trouble and "nobody has foreseen" in caplog.text


SITES = {
    "far": {"cache": "s3://far/cache"},
    "near": {"cache": "local"},
    "disk": {"cache": "file:///mnt/cache"},
}


@pytest.mark.parametrize(
    ("site", "cache", "opened"),
    [
        ("far", "s3://far/cache/{owner}", True),
        ("far", "s3://far/cache", False),
        ("far", "s3://elsewhere/cache/{owner}", False),
        ("far", "http://169.254.169.254/latest", False),
        ("near", "s3://any/bucket", True),
        ("near", "gs://any/bucket", True),
        ("near", "http://any/bucket", False),
        ("near", "file:///etc", False),
        ("near", "s3://any::file:///etc", False),
        ("near", "simplecache::file:///etc", False),
        ("near", "memory://x", False),
        ("disk", "file:///mnt/cache/{owner}", True),
        ("disk", "file:///etc", False),
        ("nowhere", "s3://any/bucket", None),
    ],
)
def test_caches_are_opened_where_the_run_file_says(
    site: str, cache: str, opened: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context(make_spec(placement={"sites": SITES}), tmp_path)
    caches, url = Caches(context.record, context.log), cache.format(owner=unique_name(context.record))
    rates = {"origin": 1.0, "near": 2.0, "elsewhere": 3.0}
    for _ in range(2):
        found = caches.allowed(fill(SiteReport, run=RUN, site=site, cache=url, rates=rates))
        assert (found is None) == (opened is None)
        assert found is None or (found.cache, found.rates) == (
            url if opened else "", {"origin": 1.0, "near": 2.0}
        )  # fmt: skip
    assert caplog.text.count(f"nothing is read from site {site}") == (0 if opened else 1)


def test_one_site_s_cache_that_can_t_be_opened_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def open_(url: str) -> FileStore:
        if "bad" in url:
            raise ValueError("no such protocol")
        return FileStore(url)

    monkeypatch.setattr("infra.sites.peers.open_store", open_)
    reports = tuple(
        fill(SiteReport, run=RUN, site=site, version=-1, sent_at=1.0, cache=f"file:///{site}",
             rates={"origin": 1.0, "bad": 9.0, "good": 9.0})
        for site in ("good", "bad", "own")
    )  # fmt: skip
    peers = Peers(tmp_path, threading.Event())
    chunks = [Chunk(hash=f"{number:064x}", size=1 << 20) for number in range(12)]
    ways = peers.ways(Heard(announcement(0), reports), "own", -1, chunks)
    assert len(ways) == 12
    assert {way.site for way in ways.values() if way.far is not None} == {"good"}
    assert peers.rates == {"bad": 0.0} and caplog.text.count("the cache of site bad can't be opened") == 1


def test_runs_of_one_name_have_caches_of_their_own(tmp_path: Path) -> None:
    one = make_context(make_spec(), tmp_path / "one").record
    other = make_context(make_spec(), tmp_path / "other").record
    drawn = [one.model_copy(update={"identity": name}) for name in "ab"]
    assert len({cache_of("s3://c", record) for record in (one, other, *drawn)}) == 4
    assert cache_of("s3://c/", one) == cache_of("s3://c", one.model_copy(update={"bootstrap_servers": "x"}))

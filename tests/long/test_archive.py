"""The archive: nothing lost, nothing twice, whatever is on the log and wherever a pass dies."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.archive.archive_reading import ArchiveIndex, ArchiveStock
from infra.archive.archive_writing import ArchivePass, ArchiveWriter
from infra.archive.archived_topics import KINDS
from infra.archive.columns import FAULT, RAW, to_records, to_table
from infra.archive.joined_bus import JoinedBus
from infra.archive.segments import ArchiveError, segment_key
from infra.bus import BusError, Record, read_all
from infra.keys import KeysError
from infra.memory_bus import MemoryBus
from infra.roles.heart import Heart
from infra.stores.file_store import FileStore
from infra.stores.store import Store, StoreError
from schemas.topics import Topics
from schemas.wire import Message, RawArray, decode, encode
from tests.factories import make_sample, make_spec
from tests.fakes.crashing import AFTER, BEFORE, TORN, Crash, CrashingStore, Killed, Life

SPEC = make_spec()
TOPICS = Topics("test-1", 2)
WORDS = st.text(max_size=12)
NUMBERS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(width=64)


def values_of(name: str, hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field may have on the wire, whether they make sense or not."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        arrays = [mark for mark in marks if isinstance(mark, RawArray)]
        if arrays:
            dtype = np.dtype(arrays[0].dtype)
            raw = st.binary(max_size=8 * dtype.itemsize)
            return raw.map(
                lambda some: np.frombuffer(some[: len(some) // dtype.itemsize * dtype.itemsize], dtype)
            )
        return values_of(name, inner)
    if get_origin(hint) is list:
        return st.lists(values_of(name, get_args(hint)[0]), max_size=4)
    if get_origin(hint) is dict:
        return st.dictionaries(WORDS, FLOATS, max_size=4)
    wide = (
        st.integers(0, 2**64 - 1) if name == "seed" else st.one_of(NUMBERS, st.integers(-(2**63), 2**64 - 1))
    )
    plain = {int: wide, float: FLOATS, str: WORDS, bool: st.booleans(), bytes: st.binary(max_size=30)}
    return plain[hint]


@st.composite
def encoded(draw: st.DrawFn, kind: type[Message]) -> bytes:
    """A record: a message of a kind with any fields, or just bytes."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.binary(max_size=40))
    hints = get_type_hints(kind, include_extras=True)
    fields = {name: draw(values_of(name, hints[name])) for name in kind.__struct_fields__}
    return encode(kind(**fields))


@pytest.mark.parametrize("short", sorted(KINDS))
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_record_comes_back_to_the_last_byte(short: str, data: st.DataObject) -> None:
    kind = KINDS[short]
    values = data.draw(st.lists(encoded(kind), min_size=1, max_size=6))
    records = [Record("t", n % 2, n, b"k%d" % n, value) for n, value in enumerate(values)]
    table = to_table(records, kind)
    found = list(to_records(table, "t", kind))
    for before, now in zip(records, sorted(found, key=lambda one: one.offset), strict=True):
        if before != now:  # it was packed
            assert kind.DICTIONARY and encode(decode(now.value, kind)) == before.value
            assert replace(now, value=before.value) == before


def test_what_can_be_read_is_in_columns_and_nothing_of_it_is_kept_twice() -> None:
    samples = [make_sample(SPEC, 0, index, reward=math.nan if index else 0.5, reward_error="x" * index)
               for index in range(2)]  # fmt: skip
    table = to_table([Record("t", 0, n, b"", encode(one)) for n, one in enumerate(samples)], KINDS["samples"])
    assert table[RAW].null_count == table[FAULT].null_count == 2
    assert table["tokens"].to_pylist() == [one.tokens.tolist() for one in samples]
    assert table["seed"].to_pylist() == [one.seed for one in samples]


def test_a_record_that_we_would_write_otherwise_keeps_its_bytes_beside_its_columns() -> None:
    raw = encode(make_sample(SPEC, 0, 0))
    other, broken = raw[:6] + b"\1\0" + raw[8:], raw.replace(b"scored_at", b"SCORED_at")
    assert len({raw, other, broken}) == 3
    records = [Record("t", 0, n, b"", value) for n, value in enumerate((raw, other, broken))]
    table = to_table(records, KINDS["samples"])
    assert [one is not None for one in table[RAW].to_pylist()] == [False, True, True]
    assert [one is not None for one in table[FAULT].to_pylist()] == [False, False, True]
    assert list(to_records(table, "t", KINDS["samples"])) == records


class Log:
    """A log with samples, its archive, and both as one bus."""

    def __init__(self, folder: Path) -> None:
        self.bus, self.store = MemoryBus(), FileStore(f"file://{folder}/store")
        self.bus.create_topics(TOPICS.all())
        self.written: list[Record] = []
        self.joined = JoinedBus(self.bus, self.store, lambda run: "me")

    def add(self, *groups: int, raw: bytes | None = None) -> None:
        for group in groups:
            sample = make_sample(SPEC, group, 0)
            sent = self.bus.append(
                TOPICS.samples, group % 2, sample.id.encode(), encode(sample) if raw is None else raw
            )
            record = Record(TOPICS.samples.name, group % 2, sent.at, sample.id.encode(), b"")
            self.written.append(replace(record, value=encode(sample) if raw is None else raw))

    def archive(
        self, *, store: Store | None = None, window: int = 1000, identity: str = "me", now: float = 1.0
    ) -> ArchivePass:  # fmt: skip
        writer = ArchiveWriter(
            self.bus, store or self.store, TOPICS, "test-1", identity, deadline_s=5, window=window
        )
        return writer.archive(now=now)

    def forget(self, partition: int, before: int) -> None:
        self.bus.truncate(TOPICS.samples, partition, before)

    def in_archive(self) -> list[Record]:
        stock = ArchiveStock(ArchiveIndex(self.store, "test-1", "me"), TOPICS.samples.name, "samples")
        found: list[Record] = []
        for part in range(2):
            at = stock.begin(part)
            while batch := stock.read(part, at, 3):
                found += batch
                at = batch[-1].offset + 1
        return found

    def check(self) -> None:
        """All that was ever written can be read, once, in order, from the archive and from both."""
        wanted = sorted(self.written, key=lambda one: (one.partition, one.offset))
        found = read_all(self.joined, TOPICS.samples, deadline_s=5)
        for part in range(2):
            mine = [one for one in found if one.partition == part]
            assert mine == [one for one in wanted if one.partition == part]

    def files(self) -> set[str]:
        return {key for key in self.store.list("archive") if key.endswith(".parquet")}

    def named(self) -> set[str]:
        index = ArchiveIndex(self.store, "test-1", "me")
        return {
            f"archive/test-1/{file.name}" for segment in index.up_to(index.newest()) for file in segment.files
        }


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 9)), st.tuples(st.just("archive"), st.integers(1, 12)),
            st.tuples(st.just("forget"), st.integers(0, 30)),
        ), max_size=20,
    ),
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_log_and_archive_are_one(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    log, group, archived = Log(tmp_path_factory.mktemp("log")), 0, [0, 0]
    for what, number in steps:
        if what == "add":
            log.add(*range(group, group + number))
            group += number
        elif what == "archive":
            log.archive(window=number)
            archived = [log.bus.end(TOPICS.samples, part) for part in range(2)]
        else:
            for part in range(2):
                log.forget(part, min(number, archived[part]))
        log.check()
    log.archive()
    log.archive(now=100_000.0)  # more than a day later, when files that were merged away are removed
    assert log.in_archive() == sorted(log.written, key=lambda one: (one.partition, one.offset))
    assert log.files() == log.named()


def test_a_store_that_fails_for_a_moment_is_not_taken_for_one_without_the_archive(log: Log) -> None:
    answers: list[StoreError | str] = [StoreError("the store is away"), "me"]

    def identity_of(run: str) -> str:
        said = answers.pop(0)
        if isinstance(said, StoreError):
            raise said
        return said

    log.add(0, 1, 2, 3)
    log.archive()
    log.forget(0, 2)
    joined = JoinedBus(log.bus, log.store, identity_of)
    with pytest.raises(StoreError, match="the store is away"):
        joined.reader(TOPICS.samples)
    found = read_all(joined, TOPICS.samples, deadline_s=5)
    assert sorted(found, key=lambda one: one.value) == sorted(log.written, key=lambda one: one.value)


def test_a_pass_reads_nothing_that_is_archived(log: Log) -> None:
    log.add(*range(20))
    assert log.archive().records == 20
    for part in range(2):
        log.forget(part, 10)
    before = log.files()
    assert (log.archive().records, log.archive().segments) == (0, 0)
    log.add(20)
    done = log.archive()
    assert (done.records, done.segments, done.lost) == (1, 1, {})
    assert len(log.files() - before) == 1
    log.check()


def test_single_records_are_fetched_from_both(log: Log) -> None:
    log.add(*range(20))
    log.archive(window=5)
    log.forget(0, 7)
    fetcher = log.joined.fetcher()
    found = fetcher.fetch(TOPICS.samples, {0: [3, 8, 99, -1], 1: [2], 9: [1]}, deadline_s=5)
    assert set(found) == {(0, 3), (0, 8), (1, 2)}
    assert all(found[one.partition, one.offset] == one for one in log.written
               if (one.partition, one.offset) in found)  # fmt: skip


def test_a_reader_goes_back_and_on(log: Log) -> None:
    log.add(*range(40))
    log.archive()
    log.forget(0, 15)
    reader = log.joined.reader(TOPICS.samples, {0: 18, 1: 19})
    assert len(reader.poll(0.0)) == 3
    assert reader.begin_offsets() == {0: 0, 1: 0}
    reader.seek({0: 13})
    assert reader.positions() == {0: 13, 1: 20}
    found: list[int] = []
    while batch := reader.poll(0.0, most=2):
        found += [one.offset for one in batch]
    assert found == [*range(13, 20)]


def test_retention_that_was_quicker_is_said_and_leaves_a_gap(log: Log) -> None:
    log.add(*range(20))
    log.archive()
    log.add(*range(20, 40))
    for part in range(2):
        log.forget(part, 15)
    assert log.joined.reader(TOPICS.samples).begin_offsets() == {0: 15, 1: 15}
    with pytest.raises(BusError, match="gone"):
        log.joined.reader(TOPICS.samples, {0: 3}).poll(0.0)
    assert log.archive().lost == {"samples": 10}
    log.forget(0, 20)
    assert log.joined.reader(TOPICS.samples).begin_offsets() == {0: 15, 1: 15}
    assert len(read_all(log.joined, TOPICS.samples, deadline_s=5)) == 10


def test_a_pass_may_die_at_any_write(tmp_path: Path) -> None:
    calm, life = Log(tmp_path / "calm"), Mortal(1 << 30, AFTER)
    calm.add(*range(24))
    calm.archive(store=CrashingStore(calm.store.url, life), window=9)
    assert len(life.writes) > 20
    for number in range(len(life.writes)):
        for when in (BEFORE, TORN, AFTER):
            log = Log(tmp_path / f"{when}-{number}")
            log.add(*range(24))

            life = Mortal(number, when)
            with pytest.raises(Killed):
                log.archive(store=CrashingStore(log.store.url, life), window=9)
            log.add(24)  # so that the window is another one next time
            log.archive(window=15)
            log.archive()
            for part in range(2):
                log.forget(part, 12)
            log.check()
            assert log.in_archive() == sorted(log.written, key=lambda one: (one.partition, one.offset))
            assert log.files() == log.named()
            assert not log.store.list("archive/test-1/pending")


class Mortal(Life):
    """Dies of its write of some number: notes have names that are drawn, so no write has a name to die of."""

    def __init__(self, last: int, when: str) -> None:
        super().__init__(Crash(), threading.Event(), Heart("test-1", "trainer", 0))
        self._last, self._when = last, when

    def write(self, what: str, effect: Callable[[], None], half: Callable[[], None] | None = None) -> None:
        self.writes.append(what)
        if len(self.writes) <= self._last:
            return effect()
        if self._when == TORN and half is not None:
            half()
        if self._when == AFTER:
            effect()
        raise Killed


def test_of_two_passes_at_once_one_commits(log: Log) -> None:
    log.add(*range(20))
    other = FileStore(log.store.url)

    class Racing(FileStore):
        def put_new(self, key: str, data: bytes) -> None:
            if not other.exists(key):
                log.add(20)
                log.archive(store=other)
            super().put_new(key, data)

    with pytest.raises(ArchiveError, match="another pass"):
        log.archive(store=Racing(log.store.url))
    log.archive()
    log.check()
    assert log.in_archive() == sorted(log.written, key=lambda one: (one.partition, one.offset))
    assert log.files() == log.named()


def test_a_liar_s_iterations_do_not_make_a_file_each(log: Log) -> None:
    log.add(1, raw=b"no record")
    for number in range(200):
        sample = msgspec.structs.replace(make_sample(SPEC, 0, 0), iteration=number * 1000)
        log.bus.append(TOPICS.samples, 0, b"", encode(sample))
    done = log.archive()
    assert (done.records, done.unreadable) == (201, 1)
    assert len(log.files()) == 65
    assert len(log.in_archive()) == 201


def test_the_newest_segment_is_found_among_many(log: Log) -> None:
    for number in range(40):
        log.add(number)
        log.archive()
    index = ArchiveIndex(log.store, "test-1", "me")
    assert index.count() == 40
    for part, offset in ((0, 0), (0, 19), (1, 7)):
        segment = index.with_offset("samples", part, offset)
        assert segment is not None and segment.number == 2 * offset + part
    assert index.with_offset("samples", 0, 20) is None
    log.check()


def damaged(log: Log, key: str, change: Any) -> None:
    path = Path(log.store.url.removeprefix("file://")) / key
    path.write_bytes(change(path.read_bytes()))


def changed(**fields: Any) -> Any:
    """A segment with other fields, and the digest that these have."""

    def change(raw: bytes) -> bytes:
        from blake3 import blake3

        from infra.sealed import canonical_json

        said = json.loads(raw)
        said.pop("digest")
        said |= {name: value(said[name]) if callable(value) else value for name, value in fields.items()}
        return canonical_json({**said, "digest": blake3(canonical_json(said)).hexdigest()})

    return change


def of_first(items: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return [items[0] | fields, *items[1:]]


HOSTILE = {
    "cut": lambda raw: raw[:-20],
    "no object": lambda raw: b"[]",
    "deep": lambda raw: b"[" * 100_000,
    "another run": changed(run="test-2"),
    "another number": changed(number=7),
    "another start of the run": changed(identity="you"),
    "newer": changed(format=2),
    "outside": changed(files=lambda files: of_first(files, name="../../runs/test-1/run.json")),
    "of another segment": changed(
        files=lambda files: of_first(files, name=files[0]["name"].replace("00000000-", "00000001-"))
    ),
    "large": changed(files=lambda files: of_first(files, size=1 << 40)),
    "rows": changed(files=lambda files: of_first(files, parts=of_first(files[0]["parts"], rows=1 << 50))),
    "beyond": changed(files=lambda files: of_first(files, parts=of_first(files[0]["parts"], last=1 << 50))),
    "twice": changed(files=lambda files: files + files),
    "backwards": changed(spans=lambda spans: of_first(spans, begin=1 << 40)),
    "unknown topic": changed(spans=lambda spans: of_first(spans, topic="owner")),
}


@pytest.mark.parametrize("how", sorted(HOSTILE))
def test_a_segment_that_can_not_be_is_refused(how: str, log: Log) -> None:
    log.add(*range(20))
    log.archive()
    damaged(log, segment_key("test-1", 0), HOSTILE[how])
    log.forget(0, 5)
    with pytest.raises(ArchiveError, match=r"00000000\.json"):
        read_all(log.joined, TOPICS.samples, deadline_s=5)


@pytest.mark.parametrize("at", [10, 200, -30])
def test_a_damaged_file_is_refused(at: int, log: Log) -> None:
    log.add(*range(20))
    log.archive()
    for key in log.files():
        damaged(log, key, lambda raw: raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    log.forget(0, 5)
    with pytest.raises(ArchiveError, match="damaged"):
        read_all(log.joined, TOPICS.samples, deadline_s=5)


def key_pair(folder: Path) -> tuple[Path, Path]:
    key, pem = ed25519.Ed25519PrivateKey.generate(), serialization.Encoding.PEM
    private, public = folder / "key.pem", folder / "public.pem"
    private.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_an_archive_is_signed_where_keys_are_trusted(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.add(*range(20))
    log.archive()
    log.forget(0, 5)
    private, public = key_pair(tmp_path)
    monkeypatch.setenv("STREAMRL_TRUSTED_KEYS", str(public))
    with pytest.raises(ArchiveError, match="unsigned"):
        log.archive()
    with pytest.raises(KeysError, match="not signed"):
        read_all(JoinedBus(log.bus, log.store, lambda run: "me"), TOPICS.samples, deadline_s=5)
    shutil.rmtree(tmp_path / "store" / "archive")
    monkeypatch.setenv("STREAMRL_SIGNING_KEY", str(private))
    other = Log(tmp_path / "other")
    other.add(*range(20))
    other.archive()
    other.forget(0, 5)
    other.check()
    damaged(other, segment_key("test-1", 0), changed(made_at=2.0))
    with pytest.raises(KeysError, match="none of the keys"):
        read_all(JoinedBus(other.bus, other.store, lambda run: "me"), TOPICS.samples, deadline_s=5)

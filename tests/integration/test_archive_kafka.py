"""The archive with a real broker: records are removed from Kafka, and read from a folder or from S3."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from uuid import uuid4

import pytest

from consumers.batches.log_places import fetch
from flows.run.archive_query import answered
from infra.archive.archive_reading import ArchiveIndex
from infra.archive.archive_writing import ArchiveWriter
from infra.archive.joined_bus import JoinedBus
from infra.archive.merging import ArchiveMerger
from infra.bus import BusError, read_all
from infra.kafka_bus import KafkaBus
from infra.runs import RunRecord
from infra.stack.s3 import S3Access
from infra.stores.opening import open_store
from schemas.topics import Topics
from schemas.wire import encode
from tests.factories import make_sample, make_spec
from tests.retention import remove_before

SPEC = make_spec()
COUNT = 300


@pytest.mark.parametrize("where", ["file", "s3"])
def test_records_that_kafka_has_removed_come_from_the_archive(
    where: str, kafka: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/store"
    if where == "s3":
        access: S3Access = request.getfixturevalue("s3")
        for name, value in access.env().items():
            monkeypatch.setenv(name, value)
        url = f"{access.url}/{uuid4().hex}"
    store, run = open_store(url), f"a{uuid4().hex[:8]}-1"
    bus, topics = KafkaBus(kafka), Topics(run, 2)
    bus.create_topics(topics.all())
    record = RunRecord(
        id=run, spec=SPEC, bootstrap_servers=kafka, store=url, model="m", created_at=0.0, identity="me"
    )
    writer = bus.writer()

    def add(first: int, last: int) -> None:
        for group in range(first, last):
            sample = make_sample(SPEC, group, 0, run=run)
            writer.send(topics.samples, encode(sample), key=sample.id, partition=group % 2)
        writer.flush(150)

    def archive() -> int:
        return (
            ArchiveWriter(bus, store, topics, run, "me", deadline_s=150, window=100).archive(now=1.0).records
        )

    def ask(sql: str) -> list[tuple[object, ...]]:
        with answered(bus, store, record, sql) as answer:
            return [row for rows in answer.rows for row in rows]

    add(0, COUNT)
    wanted = read_all(bus, topics.samples, deadline_s=150)
    assert archive() == COUNT
    remove_before(kafka, topics.samples, dict.fromkeys(range(topics.samples.partitions), 100))
    add(COUNT, COUNT + 20)
    joined = JoinedBus(bus, store, lambda run: "me")
    found = read_all(joined, topics.samples, deadline_s=150)
    assert len(found) == COUNT + 20
    for part in range(2):
        mine = [one for one in found if one.partition == part]
        assert [one.offset for one in mine] == list(range(COUNT // 2 + 10))
        assert mine[: COUNT // 2] == [one for one in wanted if one.partition == part]
    places = [(0, 3), (1, 99), (1, 140), (0, 155)]
    rows = fetch(joined, topics.samples, places, what="samples", deadline_s=30)
    assert [row.sample.group for row in rows] == [6, 199, 281, 310]
    with pytest.raises(BusError):
        fetch(bus, topics.samples, places, what="samples", deadline_s=30)
    reader = joined.reader(topics.samples, {0: 98, 1: COUNT // 2}, patient=True)
    seen: list[tuple[int, int]] = []
    while len(seen) < 72:
        seen += [(one.partition, one.offset) for one in reader.poll(5.0)]
    reader.close()
    assert sorted(seen) == [(0, n) for n in range(98, 160)] + [(1, n) for n in range(150, 160)]
    fetched = joined.fetcher().fetch(topics.samples, {0: [5, 120], 1: [999]}, deadline_s=150)
    assert {(0, 5), (0, 120)} <= set(fetched)
    assert [fetched[0, 5]] == [one for one in wanted if (one.partition, one.offset) == (0, 5)]
    assert ask("select count(*), count(distinct seed) from samples") == [(COUNT + 20, COUNT + 20)]
    assert archive() == 20
    assert ask("select count(*) from samples where iteration < 10") == [(40,)]
    files = set(store.list(f"archive/{run}/"))
    assert ArchiveMerger(ArchiveIndex(store, run, "me"), fan=2, kept_s=0.0).merge(now=2.0) == 3
    assert files - set(store.list(f"archive/{run}/")), "files that were merged into others are removed"
    merged = read_all(JoinedBus(bus, store, lambda run: "me"), topics.samples, deadline_s=150)
    in_order = attrgetter("partition", "offset")
    assert sorted(merged, key=in_order) == sorted(found, key=in_order)
    assert ask("select count(*), count(distinct seed) from samples") == [(COUNT + 20, COUNT + 20)]
    bus.delete_topics([topic.name for topic in topics.all()])

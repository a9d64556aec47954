"""SQL over archive and log: one table, read-only, and no way out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.run.archive_query import QueryError, answered
from flows.run.archiving import archiving, late_in_words, lost_in_words
from flows.run.removing import remains, remove
from flows.run.request import RunCancelled, RunFailed
from infra import runs
from infra.archive.archive_writing import ArchivePass, ArchiveWriter
from infra.archive.segments import ArchiveError
from infra.errors import Explained
from infra.roles.context import RoleContext
from schemas.loading import RunFileError
from schemas.messages import DeadLetter, StepRecord
from schemas.runspec import RunSpec
from schemas.topics import Topics
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec
from tests.fakes.fill import fill


@pytest.fixture
def context(tmp_path: Path) -> RoleContext:
    return make_context(make_spec(), tmp_path)


def add(context: RoleContext, groups: range) -> None:
    for group in groups:
        sample = make_sample(context.spec, group, 0, reward_parts={"digits": float(group)})
        context.writer.send(context.topics.samples, encode(sample), key=sample.id, partition=group % 2)


def archive(context: RoleContext) -> ArchivePass:
    writer = ArchiveWriter(context.bus, context.store, context.topics, context.run, "", deadline_s=5)
    return writer.archive(now=1.0)


def ask(context: RoleContext, sql: str) -> list[tuple[Any, ...]]:
    with answered(context.bus, context.store, context.record, sql) as answer:
        return [row for rows in answer.rows for row in rows]


@pytest.mark.parametrize("archived", [0, 30, 50])
@pytest.mark.parametrize("forget", [False, True])
def test_archive_and_log_are_one_table(archived: int, forget: bool, context: RoleContext) -> None:
    add(context, range(archived))
    archive(context)
    for part in range(2) if forget else ():
        context.bus.truncate(context.topics.samples, part, archived // 2)  # type: ignore[attr-defined]
    add(context, range(archived, 50))
    ((count, tokens, groups),) = ask(
        context, 'select count(*), sum(len(tokens)), sum(distinct "group") from samples'
    )
    samples = [make_sample(context.spec, group, 0) for group in range(50)]
    assert (count, tokens, groups) == (50, sum(one.true_length for one in samples), sum(range(50)))
    assert ask(context, "select reward_parts['digits'] from samples where \"group\" = 31") == [(31.0,)]
    found = ask(context, "select count(*) from samples where iteration = 3")
    assert found == [(sum(one.iteration == 3 for one in samples),)]


def test_what_is_not_of_this_run_or_no_record_is_not_in_the_table(context: RoleContext) -> None:
    other = make_sample(context.spec, 0, 0, run="test-2")
    context.writer.send(context.topics.samples, encode(other), key="x")
    context.writer.send(context.topics.samples, b"no record", key="x")
    add(context, range(2))
    assert ask(context, "select count(*) from samples") == [(2,)]
    archive(context)
    assert ask(context, "select count(*) from samples") == [(2,)]


def test_the_first_record_of_a_step_counts(context: RoleContext) -> None:
    for trainer, step in ((1, 0), (1, 1), (2, 1), (2, 2)):
        record = fill(StepRecord, run=context.run, trainer_epoch=trainer, step=step)
        context.writer.send(context.topics.ledger, encode(record), key="x")
    assert ask(context, "select step, trainer_epoch from steps order by 1") == [(0, 1), (1, 1), (2, 2)]


def test_views_can_be_joined_with_themselves_and_others(context: RoleContext) -> None:
    add(context, range(8))
    archive(context)
    add(context, range(8, 10))
    letter = fill(DeadLetter, run=context.run, topic=context.topics.samples.name, partition=0, offset=3)
    context.writer.send(context.topics.dead, encode(letter), key="x")
    sql = (
        "select count(*) from samples a join samples b using (log_partition, log_offset) where a.seed=b.seed"
    )
    assert ask(context, sql) == [(10,)]
    sql = "select s.seed from dead d join samples s on s.log_partition=d.partition and s.log_offset=d.offset"
    assert ask(context, sql) == [(600,)]


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('/etc/passwd')", "select * from '/etc/passwd'",
        "select * from read_text('{folder}/secret')", "select * from read_parquet('{folder}/*')",
        "select * from glob('/*')", "copy samples to '{folder}/out.csv'", "attach '{folder}/x.db'",
        "install httpfs", "load httpfs", "set enable_external_access = true", "pragma database_list",
        "create table t as select 1", "drop view samples", "select 1; copy samples to '{folder}/out.csv'",
        "select * from context", "select * from record", "select * from duckdb_secrets()",
        "select count(*) from samples; select 1", "", "selec", "export database '{folder}'",
        "call pragma_version()", "select getenv('HOME')",
        "explain analyze copy samples to '{folder}/out.csv'",
        "explain copy samples to '{folder}/out.csv'",
    ],
)  # fmt: skip
def test_a_query_has_no_way_out(sql: str, context: RoleContext, tmp_path: Path) -> None:
    add(context, range(4))
    (tmp_path / "secret").write_text("secret")
    before = {path.name for path in tmp_path.iterdir()}
    try:
        found = ask(context, sql.format(folder=tmp_path))
        assert "secret" not in str(found)
        assert sql.startswith("explain copy")
    except QueryError:
        pass
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_damaged_archive_is_found_by_a_query(context: RoleContext) -> None:
    add(context, range(40))
    archive(context)
    folder = Path(context.store.url.removeprefix("file://")) / "archive" / context.run
    for path in folder.rglob("*.parquet"):
        raw = path.read_bytes()
        at = raw.index(b"PAR1", 4) - 4 if raw.count(b"PAR1") > 2 else 60
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 255]) + raw[at + 1 :])
    with pytest.raises((QueryError, ArchiveError)):
        ask(context, "select * from samples")


def test_an_error_of_a_query_is_for_people(context: RoleContext) -> None:
    with pytest.raises(QueryError, match="colour"):
        ask(context, "select colour from samples")
    assert QueryError("x").lasting and isinstance(QueryError("x"), Explained)


def test_people_hear_of_what_is_lost_or_late(context: RoleContext) -> None:
    assert not lost_in_words("r-1", ArchivePass())
    assert "5 of samples" in lost_in_words("r-1", ArchivePass(lost={"samples": 5}))
    assert not late_in_words(context.record, 3600.0, "")
    assert "not archived for 200.0 h" in late_in_words(context.record, 200 * 3600.0, "no room")


def test_a_run_that_would_archive_too_late_is_refused() -> None:
    late = {"kafka": {"retention_hours": 1}, "archive": {"every_minutes": 31}}
    with pytest.raises((RunFileError, ValueError), match="every 30 minutes"):
        make_spec(placement=late)
    spec: RunSpec = make_spec(placement={"archive": {}})
    assert spec.placement.archive is not None and spec.placement.archive.every_minutes == 60
    assert Topics("x-1", 1).samples.name == "x-1.samples"


def test_a_run_archives_itself_and_a_pass_that_fails_ends_nothing(
    context: RoleContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = make_spec(placement={"archive": {}}).placement
    spec = context.spec.model_copy(update={"placement": placement})
    record = context.record.model_copy(update={"spec": spec})
    said: list[str] = []
    with archiving(context.record, context.store, said.append):
        add(context, range(6))
    assert not context.store.list("archive")  # its run file does not say so
    monkeypatch.setattr("flows.run.archiving.connect", lambda record, name: context.bus)
    with archiving(record, context.store, said.append):
        add(context, range(6, 10))
    assert ask(context, "select count(*) from samples") == [(10,)]
    for error, left in ((RunCancelled("by hand"), 2), (RunFailed("the trainer died"), 0)):
        with pytest.raises(type(error)), archiving(record, context.store, said.append):
            add(context, range(10, 12))
            raise error
        assert archive(context).records == left
    monkeypatch.setattr("flows.run.archiving.connect", lambda record, name: 1 / 0)
    with archiving(record, context.store, said.append):
        pass
    assert len(said) == 1 and "can't be archived now" in said[0]


def test_the_archive_goes_with_its_run(context: RoleContext) -> None:
    add(context, range(4))
    archive(context)
    context.store.put("archive/test-10/index/00000000.json", b"another run's")
    runs.create(
        context.store, context.spec, bootstrap_servers="none", model="m", topics=set(), run_id=context.run
    )
    found = remains(context.store, context.run, None)
    assert any(key.startswith("archive/") for key in found.objects)
    remove(context.store, found, None)
    assert context.store.list("archive") == ["archive/test-10/index/00000000.json"]
    assert not context.store.list(f"runs/{context.run}")

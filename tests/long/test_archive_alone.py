"""Everything that reads a run reads it from archive and store alone, with no broker, to the same bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from typer.testing import CliRunner

from consumers.learners.learner import TorchLearner
from consumers.replay import Again
from consumers.steps.failing import TrainingFailed
from flows.cli import app
from flows.run.reading import open_run
from flows.run.replaying import opened_source, replaying
from infra import runs
from infra.archive.archive_alone import archived_up_to
from infra.archive.archive_writing import ArchiveWriter
from infra.archive.segments import ArchiveError
from infra.bus import BusError, NoBroker, Record, read_all
from infra.runs import RunRecord
from infra.stock_bus import HeldStock, StockBus
from schemas.messages import Sample
from schemas.topics import Topic
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec, make_tiny_model
from tests.fakes.crashing import Crash, World, hurry
from tests.feeding import make_step

ALGORITHM = {"iterations": 3, "groups": 2, "group_size": 2, "learning_rate": 1e-2, "optimizer_steps": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


def no_broker(record: RunRecord, name: str) -> NoReturn:
    raise NoBroker("Kafka at nowhere can't be reached")


class Unreachable:
    """A bus whose broker is away."""

    def reader(self, *_: Any, **__: Any) -> NoReturn:
        raise NoBroker("Kafka at nowhere can't be reached")

    def topic_names(self) -> NoReturn:
        self.reader()

    def close(self) -> None:
        pass


def archived(
    folder: Path, model: str, monkeypatch: pytest.MonkeyPatch, *, crash: Crash | None = None,
    edit: Any = None, **sections: Any,
) -> World:  # fmt: skip
    """A run in memory that is archived as far as it came. Its broker is gone."""
    spec = make_spec(algorithm=ALGORITHM | sections.pop("algorithm", {}), **sections)
    hurry(monkeypatch, model, spec)
    context = make_context(spec, folder)
    record = runs.create(
        context.store, spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-1"
    )
    world = World(replace(context, record=record), model)
    if edit is not None:
        world.edit = edit
        with pytest.raises(TrainingFailed):
            world.live(crash)
    else:
        world.live(crash)
    archive(world)
    monkeypatch.setattr("infra.run_bus.connect", no_broker)
    monkeypatch.setattr("flows.run.archive_query.connect", no_broker)
    return world


def archive(world: World) -> None:
    context = world.context
    ArchiveWriter(
        world.log,
        context.store,
        context.topics,
        context.run,
        context.record.identity,
        deadline_s=5,
        window=13,
    ).archive(now=1.0)


def call(world: World, *words: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, [*words, "--store", world.context.store.url])
    assert found.exit_code == code, found.output
    return " ".join(found.output.split())


@pytest.mark.parametrize(
    "sections",
    [{}, {"loss": {"kind": "tb", "replay": 0.5}}, {"algorithm": {"mode": "async", "staleness": 1}}],
    ids=["sync", "replay of samples", "async"],
)
def test_every_step_replays_to_the_same_bits(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    world = archived(tmp_path, model, monkeypatch, **sections)
    steps = world.ledger()
    with replaying("test-1", world.context.store.url, lambda done, total: None, archive_alone=True) as opened:
        found = list(opened.again.each(0, len(steps) - 1))
    assert [one.taken.root for one in found] == [one.root_out for one in steps]
    assert all(one.equal and all(stage.equal for stage in one.stages) for one in found)
    again = Again(world.context, lambda: TorchLearner(model, world.context.spec), lambda done, total: None)
    assert [one.taken.root for one in again.each(0, len(steps) - 1)] == [one.taken.root for one in found]
    again.close()


def test_all_commands_work_with_no_broker(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = archived(tmp_path, model, monkeypatch)
    said = call(world, "replay", "test-1", "--step", "1-4", "--archive")
    assert "steps 1 to 4: 4 of 4 came to the same bits" in said
    file = tmp_path / "step.tar.zst"
    call(world, "bundle", "test-1", "--step", "3", "-o", str(file), "--archive")
    assert '"equal": true' in call(world, "replay", str(file), "--json")
    assert "holds first at step 2" in call(world, "bisect", "test-1", "--when", "step >= 2", "--archive")
    said = call(world, "explain", "test-1", "--archive", "--json", code=1)  # logprobs in memory are made up
    assert '"steps": 6' in said
    assert '"unseen": []' in said
    rows = call(world, "inspect", "test-1", "--step", "5", "--json", "--archive")
    assert rows.count('"advantage"') == 2
    assert "bits" in call(
        world, "what-if", "test-1", "--from", "4", "--set", "algorithm.learning_rate=0.001", "--archive"
    )
    assert call(world, "samples", "test-1", "--step", "5", "--json", "--archive").count('"reward"') == 2
    assert json.loads(
        call(world, "sql", "test-1", "select count(*) n from steps", "--json", "--archive")
    ) == {"n": 6}
    assert "an archive alone has none" in call(world, "samples", "test-1", "-f", "--archive", code=2)


def test_a_step_that_could_not_be_taken_is_looked_at_with_no_broker(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(sample: Sample) -> Sample:
        return structs.replace(sample, reward=1e30) if (sample.group, sample.index) == (3, 1) else sample

    world = archived(tmp_path, model, monkeypatch, edit=spoil, loss={"kind": "dr_grpo"})
    said = call(world, "replay", "test-1", "--failed", "--archive")
    assert "which could not be taken" in said
    assert "sample 0000003-01, by itself" in said


def test_it_says_how_far_the_archive_goes_and_how_to_have_more(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = archived(tmp_path, model, monkeypatch, crash=Crash("send test-1.ledger 3 1"))
    newest = len(world.ledger()) - 1
    assert archived_up_to(world.context.record, world.context.store) == newest == 2
    world.live()
    for words in (("replay", "--step", "5"), ("inspect", "--step", "5"), ("samples", "--step", "5")):
        said = call(world, words[0], "test-1", *words[1:], "--archive", code=1 if words[0] != "replay" else 3)
        assert str(newest) in said
        assert "`streamrl archive test-1 --store " in said and "adds what came since" in said
    archive(world)
    assert "same bits" in call(world, "replay", "test-1", "--step", "5", "--archive")


def test_it_says_how_far_an_archive_of_many_small_passes_goes(tmp_path: Path) -> None:
    context = make_context(make_spec(algorithm={"groups": 2, "group_size": 2}), tmp_path)
    for number in range(5):
        samples = [make_sample(context.spec, 2 * number + one, 0) for one in range(2)]
        raw = encode(make_step(context.spec, number, samples))
        context.writer.send(context.topics.ledger, raw, key=str(number))
        ArchiveWriter(
            context.bus, context.store, context.topics, context.run, context.record.identity, deadline_s=5
        ).archive(now=1.0)
        assert archived_up_to(context.record, context.store) == number


def test_without_a_broker_it_says_that_an_archive_is_there(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = archived(tmp_path, model, monkeypatch)
    for module in ("infra.run_bus", "flows.run.archive_query"):
        monkeypatch.setattr(f"{module}.connect", lambda record, name: Unreachable())
    for words in (("replay", "test-1"), ("samples", "test-1"), ("sql", "test-1", "select 1 from steps")):
        said = call(world, *words, code=1)
        assert "can't be reached. The archive of run test-1 needs no broker, and goes up to step 5" in said
        assert "say --archive" in said
    with (
        pytest.raises(NoBroker, match="archive_alone=True"),
        opened_source("test-1", world.context.store.url) as (handle, _),
    ):
        handle.bus.reader(handle.topics.ledger)


def test_a_run_without_an_archive_has_nothing_to_read_alone(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = archived(tmp_path, model, monkeypatch)
    for key in list(world.context.store.list("archive")):
        world.context.store.delete(key)
    for words in (("replay", "test-1"), ("sql", "test-1", "select 1")):
        said = call(world, *words, "--archive", code=1)
        assert "run test-1 has no archive" in said
        assert "`streamrl archive test-1 --store " in said and "makes one" in said
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: Unreachable())
    assert "--archive" not in call(world, "replay", "test-1", code=1)


def test_it_stays_as_it_was_when_it_was_opened_and_can_only_be_read(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = archived(tmp_path, model, monkeypatch, crash=Crash("send test-1.ledger 3 1"))
    with open_run("test-1", world.context.store.url, archive_alone=True) as opened:
        assert opened.newest_step() == 2
        world.live()
        archive(world)
        assert [one.step for one in opened.ledger()] == [0, 1, 2]
    with opened_source("test-1", world.context.store.url, archive_alone=True) as (handle, _):
        assert len(read_all(handle.bus, handle.topics.ledger, deadline_s=5)) == 6
        with pytest.raises(BusError, match="can only be read"):
            handle.bus.writer()
    with pytest.raises(ArchiveError), opened_source("test-1", world.context.store.url, archive_alone=True):
        raise ArchiveError("errors of the block come through")


class Gapped(HeldStock):
    """Records whose partitions go on behind the last one, as those of a compacted topic may."""

    def end(self, partition: int) -> int:
        return super().end(partition) + 3


@given(offsets=st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=3), most=st.integers(1, 7))
@settings(deadline=None)
def test_a_reader_comes_to_the_end_whatever_offsets_are_missing(offsets: list[set[int]], most: int) -> None:
    records = [Record("t", part, one, b"", b"") for part, own in enumerate(offsets) for one in sorted(own)]
    bus = StockBus({"t": Gapped(records)}, "a stock")
    reader = bus.reader(Topic("t", len(offsets)))
    ends, found = reader.end_offsets(), list[Record]()
    while any(reader.positions()[part] < end for part, end in ends.items()):
        found += reader.poll(0.0, most)
    assert sorted(found, key=lambda one: (one.partition, one.offset)) == records

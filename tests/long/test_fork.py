"""Forks: the same past, topics of their own, and without changes the same bits."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from consumers.learners.learner import TorchLearner
from consumers.replay import Again
from consumers.steps.checkpoint import Checkpoints
from consumers.steps.failing import TrainingFailed
from consumers.steps.ledger import steps_in_ledger
from consumers.stream.roots import TrainerRoots
from flows.cli import app
from flows.run.fork_settings import forked_settings
from flows.run.forking import ForkRequest, make_fork
from flows.run.request import RunFailed
from infra import runs
from infra.bus import read_all
from infra.roles.context import RoleContext
from infra.runs import RunRecord
from infra.weights.versions import WeightStore
from producers import feeder
from producers.ranker.states import States
from schemas.loading import RunFileError, load_run_file
from schemas.messages import Sample
from schemas.taken import TakenGroups
from schemas.topics import Topics
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.crashing import Crash, World
from tests.fakes.drawing import drawing
from tests.feeding import Others, essence, fed
from tests.waiting import wait_until

ALGORITHM = {"iterations": 5, "groups": 4, "group_size": 4, "learning_rate": 3e-3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)


def world_of(folder: Path, start: str, **sections: Any) -> World:
    spec = make_spec(
        algorithm=ALGORITHM | sections.pop("algorithm", {}), sampling={"max_tokens": 2},
        trainer={"checkpoint_every": 2, "keep_checkpoints": 2}, **sections,
    )  # fmt: skip
    context = make_context(spec, folder)
    record = runs.create(
        context.store, spec, bootstrap_servers="none", model=start, topics=set(), run_id="test-1"
    )
    world = World(replace(context, record=record), start)
    drawing(world, start)
    return world


def forked(parent: World, model: str, at: int, *changes: str, name: str | None = None) -> RunRecord:
    spec = parent.context.spec
    again = Again(parent.context, lambda: TorchLearner(model, spec), lambda done, total: None)
    try:
        request = ForkRequest(at, changes, name)
        return make_fork(again, parent.context, request, say=print)
    finally:
        again.close()


def context_of(parent: RoleContext, record: RunRecord) -> RoleContext:
    topics = Topics(record.id, record.spec.lengths.classes)
    parent.bus.create_topics(topics.all())
    return replace(parent, record=record, topics=topics, writer=parent.bus.writer())


def goes_on(parent: World, model: str, record: RunRecord, crash: Crash | None = None) -> World:
    """A fork's trainer to its end, with all that the others do."""
    world = World(context_of(parent.context, record), model)
    assert record.fork is not None
    world._admitted = record.fork.iteration * record.spec.algorithm.groups
    drawing(world, model)
    world.live(crash)
    return world


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"loss": {"kind": "ppo", "value_learning_rate": 1e-2}},
        {"loss": {"correction": "decoupled"}, "algorithm": {"optimizer_steps": 2}},
        {"model": {"lora": {"rank": 4}}},
        {"loss": {"kind": "tb", "replay": 0.5}},
    ],
    ids=["grpo", "ppo", "several steps", "lora", "replay"],
)
@pytest.mark.parametrize("iteration", [1, 2, 3, 5])
def test_a_fork_without_changes_ends_with_the_same_bits(
    tmp_path: Path, model: str, sections: dict[str, Any], iteration: int
) -> None:
    parent = world_of(tmp_path, model, **sections)
    parent.live()
    steps = parent.ledger()
    at = iteration * parent.context.spec.algorithm.optimizer_steps
    changes = ("algorithm.iterations=6",) if iteration == 5 else ()
    record = forked(parent, model, at, *changes)
    assert record.id == "test-2"
    assert record.fork is not None
    assert (record.fork.run, record.fork.step, record.fork.iteration) == ("test-1", at, iteration)
    assert runs.find(parent.context.store, "test-2") == record
    published = WeightStore(parent.context.store, "test-2")
    assert published.versions() == [iteration]
    assert published.fetch(iteration, root=steps[at - 1].root_out)
    fork = goes_on(parent, model, record)
    own = fork.ledger()
    assert [step.step for step in own] == list(range(at, at + len(own)))
    if not changes:
        assert [step.root_out for step in own] == [step.root_out for step in steps[at:]]
        # in the order in which they came, which varies: no partition is always read first
        assert [sorted(step.groups) for step in own] == [sorted(step.groups) for step in steps[at:]]
    else:
        assert len(own) == parent.context.spec.algorithm.optimizer_steps
    assert [step.root_out for step in parent.ledger()] == [step.root_out for step in steps]


def test_a_fork_with_changes_goes_its_own_way(tmp_path: Path, model: str) -> None:
    parent = world_of(tmp_path, model)
    parent.live()
    record = forked(parent, model, 2, "algorithm.learning_rate=0.01", name="bold")
    assert (record.id, record.spec.run) == ("bold-1", "test")
    fork = goes_on(parent, model, record)
    theirs, ours = parent.ledger()[2], fork.ledger()[0]
    assert ours.seeds_digest == theirs.seeds_digest, "the same samples"
    assert ours.root_out != theirs.root_out
    again = forked(fork, model, 4, name="bold")
    assert again.id == "bold-2"
    assert again.fork is not None
    assert again.fork.run == "bold-1"


@pytest.mark.parametrize(
    "mode",
    [{}, {"mode": "async", "staleness": 1}, {"mode": "async", "staleness": 1, "order": "arrival"}],
    ids=["sync", "async", "arrival"],
)
def test_its_feeder_goes_on_with_the_groups_of_the_run(
    tmp_path: Path, model: str, mode: dict[str, Any]
) -> None:
    spec = make_spec(
        algorithm={"iterations": 6, "groups": 40, "group_size": 2} | mode, lengths={"classes": 2}
    )
    context = make_context(spec, tmp_path)
    record = runs.create(
        context.store, spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-1"
    )
    others = Others(spec, tmp_path, replace(context, record=record, role="feeder"))
    states = States.of_run(context.store, "test-1")
    with fed(others) as life:
        counters = life.context.heart.counters
        for iteration in range(6):
            if iteration == 5:  # with the last one the feeder ends, and its ranker learns no more
                wait_until(lambda: counters.get("ranker", 0) >= 5, what="ranker 5")
                wait_until(lambda: 3 in states.numbers(), what="a ranker")
            others.await_groups(others.admissible(iteration))
            others.generate(iteration=iteration)
            others.train(iteration)
    taken = TakenGroups(spec.algorithm)
    for step in steps_in_ledger(others.context):
        if step.step < 3:
            taken.add(step)
    trained = {
        group for group in others.admissible(3) if group in taken or (not taken.known() and group < 120)
    }
    assert len(trained) == 120
    learner, roots = TorchLearner(model, spec), TrainerRoots(spec, lambda version: None)
    roots.keep_all({0: "r", 1: "r", 2: "r"})
    again = SimpleNamespace(
        learner=learner, newest=lambda: 5, stand_before=lambda number: None, taken=taken, roots=roots
    )
    fork = make_fork(again, others.context, ForkRequest(3), say=print)  # type: ignore[arg-type]
    learner.close()
    published = WeightStore(context.store, fork.id).manifest(3)

    class Forked(Others):
        def publish(self, sample: Sample) -> None:
            root = published.root if sample.versions[0] == 3 else "r"
            super().publish(structs.replace(sample, run=fork.id, roots=[root]))

    own = Forked(spec, tmp_path, context_of(others.context, fork))
    in_work = own.prompts()
    given = read_all(own.context.bus, own.context.topics.samples, deadline_s=5)
    assert len(given) == 2 * len(in_work), "their samples, too, were all drawn by older weights"
    done: list[set[tuple[int, int]]] = []
    with pytest.MonkeyPatch.context() as patched:
        past = feeder.Past
        patched.setattr(feeder, "Past", lambda *said: (done.append(set(said[0])), past(*said))[1])
        with fed(own):
            own.await_groups(set(others.admissible(3)) - trained)
    assert {group for group, _ in done[0]} == set(in_work), "they are not drawn again"
    theirs = others.prompts()
    found = own.prompts()
    assert set(found) == set(others.admissible(3)) - trained
    assert len(own.sent()) == len(found)
    assert set(in_work) == {group for group in found if group < len(others.admissible(2))}
    same = lambda prompt: [one for one in essence(prompt) if one not in ("test-1", fork.id)]  # noqa: E731
    for group, prompt in found.items():
        assert same(prompt) == same(theirs[group])


@pytest.mark.parametrize(
    "at, message",
    [
        (3, "inside iteration 1, and a fork begins with an iteration: step 2 or 4"),
        (1, "begins with an iteration: step 2$"),
        (0, "start a new run"),
        (12, "can begin with step 2 to 10, not with 12"),
    ],
)
def test_where_no_fork_can_begin(tmp_path: Path, model: str, at: int, message: str) -> None:
    parent = world_of(tmp_path, model, algorithm={"optimizer_steps": 2})
    parent.live()
    with pytest.raises(RunFailed, match=message):
        forked(parent, model, at)
    assert runs.runs_of(parent.context.store) == ["test-1"]


@pytest.mark.parametrize("change", ["order=window", "staleness=2", "staleness_cap=9"])
def test_what_order_arrival_depends_on_can_not_change(tmp_path: Path, model: str, change: str) -> None:
    parent = world_of(tmp_path, model, algorithm={"mode": "async", "staleness": 1, "order": "arrival"})
    parent.live()
    with pytest.raises(RunFileError, match="groups were trained before their turn"):
        forked(parent, model, 2, f"algorithm.{change}")
    assert runs.runs_of(parent.context.store) == ["test-1"]


def test_a_fork_that_was_not_finished_is_never_trained(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = world_of(tmp_path, model)
    parent.live()

    def fails(*args: Any, **named: Any) -> None:
        raise OSError("the store is full")

    with monkeypatch.context() as patched:
        patched.setattr("consumers.steps.checkpoint.Checkpoints.save", fails)
        with pytest.raises(OSError, match="full"):
            forked(parent, model, 2)
    assert runs.runs_of(parent.context.store) == ["test-1"]
    assert not [key for key in parent.context.store.list("runs/test-2") if key.startswith("runs/test-2/")]
    record = forked(parent, model, 2)  # of one that was killed half way, the checkpoint is missing
    for key in parent.context.store.list("runs/test-2/checkpoints"):
        parent.context.store.delete(key)
    with pytest.raises(TrainingFailed, match="a fork of test-1 at step 2, and the checkpoint"):
        goes_on(parent, model, record)


@pytest.mark.parametrize(
    "changes, message",
    [
        (["seed=3"], "problems would come in another order"),
        (["model.dtype=bfloat16"], "the state at that step is of this model"),
        (["algorithm.groups=8"], "counted in iterations of so many groups"),
        (["lengths.classes=3"], "the ranker has learned by these"),
        (["algorithm.iterations=2"], "nothing would be left to train"),
        (["loss.kind=ppo"], "has none: start a new run"),
        (["algorithm.learning_rate=-1"], "greater than 0"),
        (["run=other"], "--name gives the fork's id another"),
    ],
)
def test_changes_that_do_not_fit_the_past(tmp_path: Path, changes: Sequence[str], message: str) -> None:
    context = make_context(make_spec(), tmp_path)
    with pytest.raises(RunFileError, match=message):
        forked_settings(context.record, changes, 2)


def test_changes_of_a_fork(tmp_path: Path) -> None:
    record = make_context(make_spec(), tmp_path).record
    found = forked_settings(
        record,
        ["loss.kind=dapo", "sampling.temperature=0.9", "generator.slots=7", "algorithm.iterations=9"],
        2,
    )
    assert (found.loss.kind, found.loss.average, found.sampling.temperature) == ("dapo", "token", 0.9)
    assert (found.generator.slots, found.algorithm.iterations, found.run) == (7, 9, "test")
    assert forked_settings(record, [], 2) == record.spec


def test_a_change_inside_a_section_leaves_its_other_settings(tmp_path: Path) -> None:
    kafka = {"bootstrap_servers": "broker:9092", "retention_hours": 100}
    placement = {"kafka": kafka, "balance": {"least": 2, "most": 4}, "sites": {"eu": {"relays": 3}}}
    record = make_context(make_spec(placement=placement), tmp_path).record
    changes = ["placement.kafka.retention_hours=5", "placement.balance.most=6", "placement.sites.us.relays=2"]
    found = forked_settings(record, changes, 2).placement
    assert (found.kafka.bootstrap_servers, found.kafka.retention_hours) == ("broker:9092", 5)
    assert found.balance is not None and (found.balance.least, found.balance.most) == (2, 6)
    assert {name: site.relays for name, site in found.sites.items()} == {"eu": 3, "us": 2}
    whole = forked_settings(record, ["placement.balance={most: 6}", "placement.sites={}"], 2).placement
    assert whole.balance is not None and whole.balance.least == 1, "a section that is given is as it is given"
    assert not whole.sites


def test_old_records_can_be_read_and_new_ones_by_old_versions(tmp_path: Path, model: str) -> None:
    context = make_context(make_spec(), tmp_path)
    record = runs.create(context.store, context.spec, bootstrap_servers="none", model=model)
    assert b'"fork"' not in context.store.get(f"runs/{record.id}/run.json")
    assert runs.find(context.store, record.id).fork is None


def test_on_the_command_line(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = at_hand(tmp_path, model, monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    words = ["fork", "test-1", "--store", parent.context.store.url]
    result = CliRunner().invoke(app, [*words, "--at", "2", "--set", "algorithm.learning_rate=0.01"])
    assert result.exit_code == 0, result.output
    assert "test-2 is a fork of test-1 at step 2; its run file is test-2.yaml" in result.output
    assert "streamrl run test-2.yaml --resume test-2" in result.output
    record = runs.find(parent.context.store, "test-2")
    said = load_run_file(tmp_path / "test-2.yaml")
    assert said.algorithm == record.spec.algorithm
    assert not runs.refused(record.spec, said, {}, {}), "its run file goes on with it"
    assert (Checkpoints(parent.context.store, "test-2").latest(print) or [None])[0]
    result = CliRunner().invoke(app, [*words, "--at", "3", "--json"])
    assert json.loads(result.stdout) == {
        "id": "test-3", "run_file": "test-3.yaml", "fork": {"run": "test-1", "step": 3, "iteration": 3},
    }  # fmt: skip
    for wrong, message in (
        (["--at", "2", "--json", "--start"], "leave one out"),
        (["--at", "0"], "start a new run"),
        (["--at", "2", "--name", "No Name"], "small letters"),
        (["--at", "2", "-o", "test-2.yaml"], "it exists already"),
        (["--at", "2", "--set", "seed=1"], "a fork can't change it"),
    ):
        result = CliRunner().invoke(app, [*words, *wrong])
        assert result.exit_code in (1, 2)
        assert message in result.output.replace("\n", " ")


def at_hand(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that has ended, of which commands know, in the folder where they are given."""
    parent = world_of(tmp_path, model)
    parent.live()
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: parent.context.bus)
    monkeypatch.chdir(tmp_path)
    return parent


def test_where_its_run_file_can_not_be_no_fork_is_made(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = at_hand(tmp_path, model, monkeypatch)
    words = ["fork", "test-1", "--store", parent.context.store.url, "--at", "2"]
    result = CliRunner().invoke(app, [*words, "-o", "nowhere/fork.yaml"])
    assert result.exit_code == 2 and "there is no folder nowhere" in result.output
    assert runs.runs_of(parent.context.store) == ["test-1"]
    (tmp_path / "test-2.yaml").write_text("of a run that had this id and was removed")
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["run_file"] == "test-2-2.yaml"
    assert load_run_file(tmp_path / "test-2-2.yaml").run == "test"


def test_a_closed_terminal_ends_a_fork_in_order(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = at_hand(tmp_path, model, monkeypatch)

    def closed(*args: Any, **named: Any) -> None:
        handler = signal.getsignal(signal.SIGHUP)
        assert callable(handler), "SIGHUP would kill the command, and leave half a fork"
        handler(signal.SIGHUP, None)

    monkeypatch.setattr("consumers.steps.checkpoint.Checkpoints.save", closed)
    result = CliRunner().invoke(app, ["fork", "test-1", "--store", parent.context.store.url, "--at", "2"])
    assert result.exit_code == 130, result.output
    assert runs.runs_of(parent.context.store) == ["test-1"]

"""Runs that are old: what is read at a start is bounded, and a run goes on after retention has passed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from consumers.batches.log_places import Gone, fetch_rows
from consumers.batches.micro_batches import MicroBatch
from consumers.batches.training_rows import Scores
from consumers.learners.learner import TorchLearner
from consumers.losses.loss import Needs
from consumers.steps.ledger import Ledger, steps_in_ledger
from consumers.stream.admitted import Admitted, admitted_prompts
from consumers.stream.recorded_groups import Replay
from consumers.stream.recorded_places import Recorded
from consumers.stream.unfit import Unfit
from infra.bus import Record
from infra.memory_bus import MemoryReader
from infra.roles.context import RoleContext
from infra.weights.versions import WeightStore
from schemas.admission import admissible
from schemas.identity import ROUND
from schemas.messages import EVAL, TRAIN, DeadLetter, Prompt, StepRecord
from schemas.wire import decode, encode
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.crashing import AFTER, Crash, World, hurry
from tests.fakes.fill import fill


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    hurry(monkeypatch, model, make_spec())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many records are read of each topic."""
    counts: dict[str, int] = {}
    poll = MemoryReader.poll

    def counted(self: MemoryReader, wait_s: float, most: int = 500) -> list[Record]:
        found = poll(self, wait_s, most)
        for record in found:
            counts[record.topic] = counts.get(record.topic, 0) + 1
        return found

    monkeypatch.setattr(MemoryReader, "poll", counted)
    return counts


def step(context: RoleContext, number: int, samples: int = 4) -> StepRecord:
    """A step of as many groups as there are samples, which stand one behind the other."""
    ids = np.arange(number * samples, (number + 1) * samples)
    return fill(
        StepRecord, run=context.run, step=number, iteration=number, last_of_iteration=True,
        version_in=number, version_out=number + 1, root_out=f"r{number}",
        partitions=np.zeros(samples, np.int16), offsets=ids, groups=ids, indexes=np.zeros(samples),
        lengths=np.ones(samples), rewards=np.zeros(samples), versions=np.full(samples, number),
        predicted=np.ones(samples), problem_ids=[""] * samples,
        microbatches=np.array([samples]),
    )  # fmt: skip


def test_a_start_reads_the_end_of_long_logs(tmp_path: Path, read: dict[str, int]) -> None:
    """100,000 iterations: the ledger from the checkpoint's position, for replay the newest thousand."""
    spec = make_spec(
        algorithm={"iterations": 200_000, "groups": 4, "group_size": 2}, loss={"kind": "tb", "replay": 0.5}
    )
    context = make_context(spec, tmp_path)
    topic, count = context.topics.ledger, 100_000
    old = encode(step(context, 0))
    for _ in range(count - 3000):
        context.writer.send(topic, old, key="0")
    for number in range(count - 3000, count):
        context.writer.send(topic, encode(step(context, number)), key=str(number))
    ledger = Ledger(context, 1)
    assert [one.step for one in ledger.rest(count - 7, count - 7)] == list(range(count - 7, count))
    assert read[topic.name] <= 1000
    replay = Replay(context, count)
    assert len(replay._recorded) == 4000
    assert read[topic.name] <= 3000
    assert next(steps_in_ledger(context, count - 2)).step == count - 2
    ledger.close()


def test_what_is_kept_of_earlier_groups_is_bounded(tmp_path: Path) -> None:
    context = make_context(make_spec(), tmp_path)
    some = [step(context, number) for number in range(40)]
    algorithm = context.spec.algorithm
    assert algorithm.groups == 4
    whole, window = Recorded(algorithm, some), Recorded(algorithm, some, kept=10)
    assert (len(whole), len(window)) == (160, 40)
    assert window.places(range(40)) == whole.places(range(120, 160))
    window.drop({0: 130})
    assert len(window) == 28  # steps 33 to 39
    assert window.places(range(28)) == whole.places(range(132, 160))
    window.add(step(context, 40))
    assert window.places([28, 31]) == [(0, 160), (0, 163)]


def letter(context: RoleContext, partition: int, offset: int) -> bytes:
    topic = context.topics.samples.name
    return encode(fill(DeadLetter, run=context.run, topic=topic, partition=partition, offset=offset))


@pytest.mark.parametrize("known", [True, False])
def test_a_start_reads_the_newest_dead_letters(tmp_path: Path, read: dict[str, int], known: bool) -> None:
    context = make_context(make_spec(), tmp_path)
    for offset in range(30_000):
        context.writer.send(context.topics.dead, letter(context, 0, offset), key="")
    context.writer.send(context.topics.dead, b"rubbish", key="")
    unfit = Unfit(context, lambda *_: False, {0: 29_990, 1: 0}, 29_990 if known else None).open()
    assert read[context.topics.dead.name] <= (11 if known else 10_500)
    assert len(unfit._known) == 10
    for offset in (29_995, 30_000, 30_001):
        unfit.put(Record(context.topics.samples.name, 0, offset, b"", b""), "rubbish")
    log = context.bus.log(context.topics.dead)[0]  # type: ignore[attr-defined]
    assert len(log) == 30_003  # one of them was there
    assert unfit.settled({0: 29_998, 1: 5}) == 29_998
    assert unfit.settled({0: 30_001, 1: 5}) == 30_001  # it stands behind that
    assert unfit.settled({0: 40_000, 1: 5}) == 30_003
    assert not unfit._known
    unfit.close()


def prompt(context: RoleContext, group: int, iteration: int, purpose: str = TRAIN) -> bytes:
    return encode(
        fill(
            Prompt, run=context.run, purpose=purpose, group=group, iteration=iteration, size=2,
            problem="x" * 500,
            bundle_groups=1, tokens=np.arange(3),
        )
    )  # fmt: skip


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_what_was_admitted_is_found_by_bisection(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """With groups drawn again, evaluations and rubbish among them, and their head gone."""
    groups, ahead = 4, data.draw(st.sampled_from([0.0, 1.0, 2.5]))
    mode = {"mode": "async", "staleness": ahead} if ahead else {}
    spec = make_spec(algorithm={"iterations": 500, "groups": groups, "group_size": 2} | mode)
    context = make_context(spec, tmp_path_factory.mktemp("log"))
    draw, topic = random.Random(data.draw(st.integers(0, 1 << 30))), context.topics.prompts
    trained, group, there = draw.randrange(60), 0, dict[int, int]()
    for version in range(trained + 1):  # what is admitted while that version is the newest
        until = admissible(version, groups, ahead)
        mine = [(one, one // groups) for one in range(group, until)]
        mine += [
            (one * groups + ROUND, one) for one in range(version, until // groups) if draw.random() < 0.2
        ]
        group = until
        draw.shuffle(mine)
        for one, window in mine:
            there[one] = window
            if draw.random() < 0.3:
                context.writer.send(topic, b"rubbish", key="", partition=one % 2)
            context.writer.send(topic, prompt(context, one, window), key="", partition=one % 2)
        for number in range(draw.choice([0, 0, 40])):
            context.writer.send(topic, prompt(context, -1 - number, version, EVAL), key="", partition=0)
    admitted = Admitted(context)
    open_now = {one for one, window in there.items() if window >= trained}
    found = admitted.groups(open_now, trained)
    assert {one: found[one].iteration for one in found} == {one: there[one] for one in open_now}
    assert all(one.problem == "" and one.tokens.tolist() == [0, 1, 2] for one in found.values())
    later = prompt(context, group, group // groups)
    context.writer.send(topic, later, key="")
    assert set(admitted.groups([group], trained + 1)) == {group}
    assert all(one.iteration > trained for one in admitted._found.values())
    admitted.close()


def test_of_two_prompts_of_a_group_the_first_counts(tmp_path: Path) -> None:
    context = make_context(make_spec(algorithm={"groups": 4, "group_size": 2}), tmp_path)
    first = prompt(context, 1, 0)
    other = structs.replace(decode(first, Prompt), tokens=np.array([9], np.int32))
    for raw in (first, encode(other)):
        context.writer.send(context.topics.prompts, raw, key="")
    admitted = Admitted(context)
    assert admitted.groups([1], 0)[1].tokens.tolist() == [0, 1, 2]
    admitted.close()


def test_no_admitted_prompt_is_lost_behind_a_long_evaluation(tmp_path: Path) -> None:
    context = make_context(make_spec(algorithm={"iterations": 50, "groups": 4, "group_size": 2}), tmp_path)
    for group in range(200):
        if group == 100:
            for number in range(600):
                raw = prompt(context, -1 - number, 25, EVAL)
                context.writer.send(context.topics.prompts, raw, key="")
        context.writer.send(context.topics.prompts, prompt(context, group, group // 4), key="")
    for first, last in ((0, 49), (20, 30), (24, 26), (30, 40)):
        found = [one.group for one in admitted_prompts(context, first, last, unfit=lambda one: "")]
        assert found == list(range(4 * first, 4 * last + 4))


def test_a_contradiction_reads_little_of_what_was_admitted(tmp_path: Path, read: dict[str, int]) -> None:
    context = make_context(make_spec(algorithm={"iterations": 5_000, "groups": 4, "group_size": 2}), tmp_path)
    for group in range(20_000):
        context.writer.send(
            context.topics.prompts, prompt(context, group, group // 4), key="", partition=group % 2
        )
    admitted = Admitted(context)
    assert set(admitted.groups([19_999, 19_998, 3], 4_998)) == {19_999, 19_998}
    assert read[context.topics.prompts.name] <= 8_000
    assert len(admitted._found) == 8
    before = read[context.topics.prompts.name]
    admitted.groups([19_997], 4_998)
    assert read[context.topics.prompts.name] == before
    admitted.close()


def world_of(folder: Path, model: str, correction: str = "none", **algorithm: Any) -> World:
    spec = make_spec(
        loss={"correction": correction},
        algorithm={"iterations": 6, "groups": 2, "group_size": 2, "learning_rate": 1e-2} | algorithm,
        trainer={"checkpoint_every": 2, "keep_weights": 4},
    )
    return World(make_context(spec, folder), model)


def forget_samples(world: World, until: int) -> None:
    """Retention takes the samples of steps before this one."""
    for one in world.ledger():
        if one.step < until:
            for partition, offset in zip(one.partitions.tolist(), one.offsets.tolist(), strict=True):
                topic = world.context.topics.samples
                world.context.bus.truncate(topic, partition, offset + 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ledger_too", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_published_weights_stand_for_steps_whose_samples_are_gone(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture, steps: int, ledger_too: bool
) -> None:
    world = world_of(tmp_path, model, optimizer_steps=steps)
    world.live(Crash("send test-1.weights newest 4", AFTER))  # version 3; the checkpoint is of iteration 2
    forget_samples(world, 3 * steps)
    if ledger_too:
        world.context.bus.truncate(world.context.topics.ledger, 0, 3 * steps)  # type: ignore[attr-defined]
    assert not world.live().dead
    warnings = [one.getMessage() for one in caplog.records if "can't be taken again" in one.getMessage()]
    assert len(warnings) == 1
    first, last = 2 * steps, 3 * steps - 1
    assert warnings[0].startswith(f"steps {first} to {last} can't be taken again")
    assert "weights 3, which are published, are used; the optimizer's moments are as" in warnings[0]
    log = [record for part in world.context.bus.log(world.context.topics.ledger) for record in part]  # type: ignore[attr-defined]
    assert world.context.bus.end(world.context.topics.ledger, 0) == 6 * steps  # type: ignore[attr-defined]
    root = (world.ledger()[-1] if not ledger_too else decode(log[-1].value, StepRecord)).root_out
    assert WeightStore(world.context.store, "test-1").fetch(6, root=root)


def test_a_step_that_left_no_weights_and_no_samples_is_gone_past(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_of(tmp_path, model)
    world.live(Crash("send test-1.ledger 3 1", AFTER))  # nothing is published of it
    forget_samples(world, 4)
    assert not world.live().dead
    assert "no weights of them are published, so what they learned is lost" in caplog.text
    assert [one.step for one in world.ledger()] == list(range(6))
    assert not world.live().dead  # and it stays so


def test_an_iteration_of_which_a_step_was_lost_is_still_compared_with_its_first_weights(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(tmp_path, model, "truncated", optimizer_steps=2)
    world.live(Crash("send test-1.ledger 5 1", AFTER))  # nothing is published of this iteration
    world.context.bus.truncate(world.context.topics.ledger, 0, 5)  # type: ignore[attr-defined]
    compared, ask = [], TorchLearner.ask

    def asked(self: TorchLearner, batch: MicroBatch, needs: Needs) -> Scores:
        first = self._first.state_dict()
        compared.append(all(torch.equal(one, first[name]) for name, one in self._model.state_dict().items()))
        return ask(self, batch, needs)

    monkeypatch.setattr(TorchLearner, "ask", asked)
    assert not world.live().dead
    assert compared[0], "nothing was learned since the iteration began"


def test_another_sample_in_the_place_of_one_is_found_out(tmp_path: Path, model: str) -> None:
    """The topic was made anew."""
    world = world_of(tmp_path, model)
    world.live(Crash("send test-1.weights newest 4", AFTER))
    for part in world.context.bus.log(world.context.topics.samples):  # type: ignore[attr-defined]
        part[:] = [
            Record(one.topic, one.partition, number, part[0].key, part[0].value)
            for number, one in enumerate(part)
        ]
    with pytest.raises(Gone, match="the topic was made anew since"):
        fetch_rows(world.context, world.context.topics.samples, world.ledger()[0])
    elsewhere = structs.replace(world.ledger()[0], partitions=np.full(4, 99, np.int16))
    with pytest.raises(Gone, match=r"test-1\.samples\[99\]@\d is gone"):
        fetch_rows(world.context, world.context.topics.samples, elsewhere)

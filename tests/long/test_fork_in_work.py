"""Forks of async runs: groups that were in work at the step go on, and none is lost or trained twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumers.batches.training_rows import says_nothing
from infra.bus import read_all
from infra.roles.context import RoleContext
from producers.snapshots import Snapshots
from schemas.admission import admissible, latest_iteration
from schemas.identity import ROUND, round_of
from schemas.messages import Prompt, Sample, StepRecord, WeightsAnnouncement
from schemas.wire import decode, encode
from tests.factories import make_sample, make_tiny_model
from tests.fakes.crashing import World
from tests.feeding import make_prompt
from tests.long.test_fork import context_of, world_of
from tests.long.test_fork_past import forked

GROUPS = 4
ASYNC = {"mode": "async", "staleness": 1, "iterations": 7, "groups": GROUPS}
ARRIVAL = ASYNC | {"order": "arrival", "staleness_cap": 3}
DAPO = {"kind": "dapo", "resample": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)


class Late(World):
    """Some groups come one or two versions later than others; some of these are drawn only then."""

    def __init__(self, context: RoleContext, model: str, seed: int = 0) -> None:
        super().__init__(context, model, seed)
        self.draw = random.Random(seed)
        self.version = 0
        self.held: dict[
            int, tuple[int, dict[str, Any]]
        ] = {}  # by group: until which version, and its weights
        self.on_log = {(one.group, one.index) for one in samples_of(context)}

    def answer(self, announced: WeightsAnnouncement) -> None:
        spec, version = self.context.spec, announced.version
        self.version = version
        algorithm = spec.algorithm
        now = {"versions": np.array([version], np.int32), "roots": [announced.root]}
        most = algorithm.iterations * algorithm.groups
        until = min(admissible(version, algorithm.groups, algorithm.lookahead), most)
        first, self._admitted = self._admitted, max(until, self._admitted)
        due = [group for group, (when, _) in self.held.items() if when <= version]
        for group in due:
            self._send(group, self.held.pop(group)[1] or now)
        fresh = list(range(first, until))
        self.draw.shuffle(fresh)
        for group in fresh:
            self._prompt(group)
            self._send_or_hold(group, version, now)

    def _send_or_hold(self, group: int, version: int, now: dict[str, Any]) -> None:
        algorithm = self.context.spec.algorithm  # no iteration waits for it
        until = min(
            version + self.draw.choice([1, 2]), latest_iteration(group, algorithm), algorithm.iterations - 1
        )
        if len(self.held) < GROUPS - 1 and until > version and self.draw.random() < 0.6:
            self.held[group] = until, now if self.draw.random() < 0.5 else {}
        else:
            self._send(group, now)

    def _prompt(self, group: int) -> None:
        prompt, topic = (
            make_prompt(self.context.spec, group, run=self.context.run),
            self.context.topics.prompts,
        )
        self.context.writer.send(topic, encode(prompt), key=str(group), partition=prompt.length_class)

    def _send(self, group: int, drawn_by: dict[str, Any]) -> None:
        spec, topic = self.context.spec, self.context.topics.samples
        made = [
            make_sample(
                spec, group, index, run=self.context.run, reward=reward(group, index), length=2, **drawn_by
            )
            for index in range(spec.algorithm.group_size)
        ]
        for sample in made:
            if (group, sample.index) not in self.on_log:
                self.context.writer.send(topic, encode(sample), key=sample.id, partition=sample.length_class)
        if round_of(group) < spec.loss.most_draws and says_nothing(made):
            self._prompt(group + ROUND)
            self._send_or_hold(group + ROUND, self.version, drawn_by)


def reward(group: int, index: int) -> float:
    """Of every third group all alike; of some of these also of the next one in its place."""
    return 0.5 if (group + round_of(group)) % 3 == 0 else float(index)


class Ongoing(Late):
    """A fork's generators: they answer what is in work, without what is there, and then go on."""

    def __init__(self, context: RoleContext, model: str, seed: int) -> None:
        super().__init__(context, model, seed)
        found = Snapshots(context.store, context.run, print).newest(lambda one: "")
        assert found is not None
        self._admitted, self.state = found.planner.admitted, found.planner
        self.in_work = prompts_of(context)
        self.redrawn = set[int]()

    def answer(self, announced: WeightsAnnouncement) -> None:
        now = {"versions": np.array([announced.version], np.int32), "roots": [announced.root]}
        self.version = announced.version
        for group in sorted(self.in_work):
            if group + ROUND not in self.in_work:
                self._send(group, now)  # and what is in its place, if it says nothing
            else:
                self._only(group, now)
        self.in_work = {}
        super().answer(announced)

    def _only(self, group: int, now: dict[str, Any]) -> None:
        spec = self.context.spec
        for index in range(spec.algorithm.group_size):
            if (group, index) not in self.on_log:
                sample = make_sample(
                    spec, group, index, run=self.context.run, reward=reward(group, index), length=2, **now
                )
                self.context.writer.send(
                    self.context.topics.samples, encode(sample), key=sample.id, partition=sample.length_class
                )

    def _prompt(self, group: int) -> None:
        if group not in self.state.taken and group % ROUND not in finals(self.state.taken):
            super()._prompt(group)

    def _send(self, group: int, drawn_by: dict[str, Any]) -> None:
        if group % ROUND not in finals(self.state.taken) or group in prompts_of(self.context):
            super()._send(group, drawn_by)


def finals(taken: Iterable[int]) -> set[int]:
    """Groups whose place is filled: the last one drawn for it tells something, or is the last that may be."""
    newest: dict[int, int] = {}
    for group in taken:
        newest[group % ROUND] = max(group, newest.get(group % ROUND, group))
    return {
        place
        for place, group in newest.items()
        if reward(group, 0) != reward(group, 1) or round_of(group) == 2
    }


def samples_of(context: RoleContext) -> list[Sample]:
    found = read_all(context.bus, context.topics.samples, deadline_s=5)
    return [decode(record.value, Sample) for record in found]


def prompts_of(context: RoleContext) -> dict[int, Prompt]:
    found = read_all(context.bus, context.topics.prompts, deadline_s=5)
    return {one.group: one for one in (decode(record.value, Prompt) for record in found)}


def late(folder: Path, model: str, seed: int, **sections: Any) -> Late:
    plain = world_of(folder, model, **{"deadlines": {"progress_s": 15}} | sections)
    return Late(plain.context, model, seed)


def groups_of(step: StepRecord) -> set[int]:
    return set(step.groups.tolist())


def check(parent: list[StepRecord], own: list[StepRecord], at: int, cap: int, iterations: int) -> None:
    """Each place is filled once, in both runs together; and nothing is too stale."""
    steps = [*parent[:at], *own]
    assert [step.step for step in steps] == list(range(iterations))
    trained = Counter(group for step in steps for group in groups_of(step))
    assert max(trained.values()) == 1, "a group was trained twice"
    assert {group % ROUND for group in trained} == set(range(iterations * GROUPS)), "a group was lost"
    for step in steps:
        assert step.iteration - int(step.versions.min()) <= cap
        assert (step.versions <= step.iteration).all()


@pytest.mark.parametrize(
    "algorithm", [ASYNC, ASYNC | {"staleness": 1.5}, ARRIVAL], ids=["one", "half", "arrival"]
)
@pytest.mark.parametrize("loss", [{"kind": "grpo"}, DAPO], ids=["grpo", "dapo"])
@pytest.mark.parametrize("seed", [0, 1])
def test_groups_in_work_go_on(
    tmp_path: Path, model: str, algorithm: dict[str, Any], loss: Mapping[str, Any], seed: int
) -> None:
    parent = late(tmp_path, model, seed, algorithm=algorithm, loss=loss)
    parent.live()
    steps, cap = parent.ledger(), int(parent.context.spec.algorithm.most_stale)
    check(steps, [], 7, cap, 7)
    theirs = {(one.group, one.index): one for one in samples_of(parent.context)}
    carried = 0
    for at in range(1, 8) if seed else (3, 5):
        changes = ("algorithm.iterations=8",) if at == 7 else ()
        context = context_of(parent.context, forked(parent, model, at, *changes))
        given = {(one.group, one.index): one for one in samples_of(context)}
        carried += len(given)
        for key, sample in given.items():
            assert sample.versions.max() <= at
            assert sample.tokens.tolist() == theirs[key].tokens.tolist()
            assert sample.run == context.run
        in_work = prompts_of(context)
        assert {group for group, _ in given} <= set(in_work)
        for group, prompt in in_work.items():
            expected = {one for one in theirs if one[0] == group and theirs[one].versions.max() <= at}
            assert {one for one in given if one[0] == group} == expected, prompt
        fork = Ongoing(context, model, seed + 1)
        fork.live()
        check(steps, fork.ledger(), at, cap, context.spec.algorithm.iterations)
    assert carried

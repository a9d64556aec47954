"""Groups whose rewards are all alike: others are drawn in their place, and the trainer waits for those."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.losses.loss import loss_of
from consumers.stream.sample_stream import SampleStream
from infra.bus import read_all
from infra.roles.context import RoleContext, Stopped
from producers.feeder import Feeder
from schemas.admission import iteration_of, oldest_version
from schemas.identity import ROUND, sample_id, sample_key
from schemas.messages import Prompt
from schemas.wire import decode, encode
from tests.factories import make_context, make_sample, make_spec
from tests.waiting import wait_until

SPEC = make_spec(loss={"kind": "dapo", "resample": 2})
PROBLEMS = [{"id": str(number), "prompt": f"{number}:"} for number in range(64)]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights are published here; these are what made the samples."""
    monkeypatch.setattr("producers.sample_feed.FeederRoots._published", lambda self, version: "r")


def prompts_of(context: RoleContext) -> dict[int, Prompt]:
    records = read_all(context.bus, context.topics.prompts, deadline_s=5)
    return {prompt.group: prompt for prompt in (decode(record.value, Prompt) for record in records)}


def publish(context: RoleContext, group: int, *rewards: float) -> None:
    """Rewards of a group's samples; an infinite one makes it unfit."""
    for index, reward in enumerate(rewards):
        prompt = prompts_of(context)[group]
        names = ("iteration", "mini", "bundle", "bundle_groups", "epoch", "problem_id", "min_version")
        fields = {name: getattr(prompt, name) for name in names}
        sample = make_sample(SPEC, group, index, reward=reward, seed=group % 1000 + index, **fields)
        context.writer.send(context.topics.samples, encode(sample), key=sample.id)


def fed(context: RoleContext) -> tuple[Feeder, threading.Thread]:
    feeder = Feeder(context, PROBLEMS, [], lambda text: [4, 5]).open()

    def run() -> None:
        with pytest.raises(Stopped):
            feeder.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return feeder, thread


def stopped(context: RoleContext, thread: threading.Thread) -> None:
    context.stop.set()
    thread.join(20)
    context.stop.clear()


def test_another_problem_comes_in_the_place_of_one_that_told_nothing(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path, role="feeder")
    _, thread = fed(context)
    wait_until(lambda: len(prompts_of(context)) == 4, what="the first iteration", deadline_s=20)
    publish(context, 0, 1.0, 0.0)
    publish(context, 1, 0.5, 0.5)
    wait_until(lambda: 1 + ROUND in prompts_of(context), what="another group", deadline_s=20)
    again = prompts_of(context)[1 + ROUND]
    assert (again.iteration, again.bundle, again.bundle_groups, again.min_version) == (0, 1 + ROUND, 1, 0)
    publish(context, 1 + ROUND, 0.0, 0.0)
    wait_until(lambda: 1 + 2 * ROUND in prompts_of(context), what="the last one", deadline_s=20)
    publish(context, 1 + 2 * ROUND, 0.0, 0.0)
    stopped(context, thread)
    before = prompts_of(context)
    # one that starts again finds the same, and sends nothing twice
    publish(context, 2, 0.25, 0.25)
    _, thread = fed(context)
    wait_until(lambda: 2 + ROUND in prompts_of(context), what="what was missed", deadline_s=20)
    stopped(context, thread)
    records = read_all(context.bus, context.topics.prompts, deadline_s=5)
    assert len(records) == len(before) + 1
    assert set(prompts_of(context)) == {0, 1, 2, 3, 1 + ROUND, 1 + 2 * ROUND, 2 + ROUND}


def test_an_unfit_sample_is_not_counted(tmp_path: Path) -> None:
    """The trainer counts the one that is made again in its place; both must come to the same."""
    context = make_context(SPEC, tmp_path, role="feeder")
    _, thread = fed(context)
    wait_until(lambda: len(prompts_of(context)) == 4, what="the first iteration", deadline_s=20)
    publish(context, 0, 0.5, math.inf)
    publish(context, 0, 0.5, 0.5)
    wait_until(lambda: ROUND in prompts_of(context), what="another group", deadline_s=20)
    publish(context, 1, math.inf, 0.5)
    publish(context, 1, 0.0, 0.0)
    publish(context, 2, 0.5, 0.5)  # what came before it is decided, too
    wait_until(lambda: 2 + ROUND in prompts_of(context), what="another group", deadline_s=20)
    stopped(context, thread)
    assert set(prompts_of(context)) == {0, 1, 2, 3, ROUND, 2 + ROUND}


def test_the_trainer_waits_for_what_is_drawn_instead(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    stream = SampleStream(context, 24, {}, (0, 0), lambda version: "r").open()

    def come(group: int, *rewards: float) -> None:
        for index, reward in enumerate(rewards):
            sample = make_sample(SPEC, group, index, reward=reward, mini=0)
            context.writer.send(context.topics.samples, encode(sample), key=sample.id)
        wanted = stream.received + len(rewards)
        wait_until(lambda: stream.pump(0.01) + 1 and stream.received == wanted, what="samples")

    key = (0, 0)
    for group in range(4):
        come(group, 0.0, float(group > 0))
    assert sum(bundle.settled(2) for bundle in stream.complete(key)) == 3
    assert stream.outstanding(key) == 2
    come(ROUND, 0.3, 0.3)
    assert sum(bundle.settled(2) for bundle in stream.complete(key)) == 3
    come(2 * ROUND, 0.3, 0.3)  # as often as it may be: it stays as it is
    bundles = stream.complete(key)
    assert sum(bundle.settled(2) for bundle in bundles) == 4
    assert stream.outstanding(key) == 0
    rows = [row for bundle in bundles for row in bundle.in_order()]
    telling = [row.sample for row in rows if row.sample.group in (1, 2, 3)]
    assert loss_of(SPEC).total([row.sample for row in rows]) == sum(s.true_length for s in telling)
    stream.close()


@given(st.integers(-5000, ROUND * 3), st.integers(0, 99))
def test_a_name_says_which_sample_it_is(group: int, index: int) -> None:
    assert sample_key(sample_id(group, index)) == (group, index)


@given(st.integers(0, 10_000), st.integers(0, 64), st.integers(1, 128), st.floats(0, 8))
def test_a_group_that_is_drawn_instead_has_the_place_of_the_first(
    group: int, times: int, groups: int, lookahead: float
) -> None:
    again = group + times * ROUND
    assert iteration_of(again, groups) == iteration_of(group, groups)
    assert oldest_version(again, groups, lookahead) == oldest_version(group, groups, lookahead)
    assert np.int64(again) == again

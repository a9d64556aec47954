"""Evaluations: beside training in async mode, before it in sync mode, and whole after any restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producers import feeder as feeder_module
from schemas.runspec import RunSpec
from tests.factories import make_spec
from tests.feeding import HELD_OUT, Life, Others, answer, fed
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights are published here; these are what made the samples."""
    monkeypatch.setattr("producers.sample_feed.FeederRoots._published", lambda self, version: "r")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("infra.tail._POLL_S", "producers.sample_feed._POLL_S", "producers.feeder._POLL_S"):
        monkeypatch.setattr(name, 0.01)
    monkeypatch.setattr("producers.snapshots._LEAST_S", 0.0)
    monkeypatch.setattr("infra.stores.file_store.os.fsync", lambda number: None)


def spec_of(mode: str = "async", **algorithm: Any) -> RunSpec:
    staleness = {"staleness": 1.0} if mode == "async" else {}
    return make_spec(
        algorithm={"iterations": 5, "groups": 4, "group_size": 2, "mode": mode, **staleness, **algorithm},
        evaluation={"problems": 3, "every": 1, "per_problem": 2}, deadlines={"progress_s": 30},
    )  # fmt: skip


def groups_of(version: int) -> set[int]:
    return {-1 - number for number in range(version * 3, version * 3 + 3)}


def test_training_goes_on_while_versions_are_evaluated(tmp_path: Path) -> None:
    others = Others(spec_of(), tmp_path)
    life = Life(others.life(), HELD_OUT)
    for version in range(5):
        others.await_groups(groups_of(version) | set(others.admissible(version)))
        others.generate(iteration=version)
        others.train(version)
    others.await_groups(groups_of(5))
    assert not others.evaluations(), "nobody has answered yet"
    others.generate("eval", 3)
    wait_until(lambda: [one.version for one in others.evaluations()] == [3], what="one of several")
    others.generate("eval")
    life.ended()
    assert life.error is None
    found = {one.version: one for one in others.evaluations()}
    assert sorted(found) == list(range(6)) and len(others.evaluations()) == 6
    assert found[2].problem_ids == ["h0", "h0", "h1", "h1", "h2", "h2"]
    assert found[2].failed == 0 and np.isfinite(found[2].rewards).all()


def test_in_sync_mode_a_version_is_evaluated_before_it_is_trained_on(tmp_path: Path) -> None:
    others = Others(spec_of("sync"), tmp_path)
    life = Life(others.life(), HELD_OUT)
    for version in range(6):
        others.await_groups(groups_of(version))
        assert not set(others.prompts()) & set(range(version * 4, 99)), "it is evaluated first"
        others.generate("eval")
        if version < 5:
            others.await_groups(range(version * 4, version * 4 + 4))
            others.generate(iteration=version)
            others.train(version)
    life.ended()
    assert life.error is None
    assert [one.version for one in others.evaluations()] == list(range(6))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_restart_in_an_evaluation_asks_for_nothing_twice(tmp_path: Path, mode: str) -> None:
    others = Others(spec_of(mode), tmp_path)
    with fed(others, HELD_OUT):
        others.await_groups(groups_of(0))
        others.generate("eval")
        others.await_groups(range(4))
        others.generate(iteration=0)
        others.train(0)
        others.await_groups(groups_of(1))
        prompts = [prompt for prompt in others.prompts().values() if prompt.group in groups_of(1)]
        for prompt in prompts[:2]:
            others.publish(answer(others.spec, prompt, 0))
            others.answered.add((prompt.group, 0))
        if mode == "async":
            others.await_groups(range(8))
            others.generate(iteration=1)
            others.train(1)
            others.await_groups(groups_of(2))
    assert [one.version for one in others.evaluations()] == [0]
    before = len(others.sent())
    with fed(others, HELD_OUT):
        others.generate("eval", 1)
        wait_until(lambda: [one.version for one in others.evaluations()] == [0, 1], what="version 1")
        if mode == "async":
            assert len(others.sent()) == before
            others.generate("eval", 2)
            wait_until(lambda: len(others.evaluations()) == 3, what="version 2")
    assert len([prompt for prompt in others.sent() if prompt.group in groups_of(1)]) == 3


def test_an_unfit_answer_is_made_again_and_one_that_is_never_fit_counts_as_failed(tmp_path: Path) -> None:
    others = Others(spec_of("sync", iterations=1), tmp_path)
    with fed(others, HELD_OUT):
        others.await_groups(groups_of(0))
        first, second, *_ = others.prompts().values()
        others.publish(answer(others.spec, first, 0, epoch=3))
        wait_until(lambda: len(others.letters()) == 1, what="a dead letter")
        letter = others.letters()[0]
        assert letter.wanted.startswith("-") and "its epoch is 3" in letter.reason
        for _ in range(3):
            others.publish(answer(others.spec, second, 1, problem_id="another"))
        wait_until(lambda: len(others.letters()) == 4, what="its dead letters")
        assert [bool(one.wanted) for one in others.letters()] == [True, True, True, False]
        others.answered.add((second.group, 1))
        others.generate("eval")
        wait_until(others.evaluations, what="the evaluation")
    found = others.evaluations()[0]
    assert found.failed == 1 and len(found.rewards) == 6
    with fed(others, HELD_OUT):
        others.await_groups(range(4))
    assert len(others.letters()) == 4, "once each"


def test_evaluations_that_nobody_gets_to_are_waited_for_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many are open that admission waits: memory stays bounded, and they get the generators."""
    monkeypatch.setattr(feeder_module, "_MOST_EVALUATIONS", 2)
    others = Others(spec_of(), tmp_path)
    with fed(others, HELD_OUT):
        for version in range(2):
            others.await_groups(groups_of(version) | set(others.admissible(version)))
            others.generate(iteration=version)
            others.train(version)
        others.await_groups(groups_of(2))
        assert not set(others.prompts()) & set(range(12, 99))
        others.generate("eval", 1)
        others.await_groups(range(12, 16))

"""The ranker on the log: it learns what was trained, whatever the order, and after any restart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from infra.roles.context import RoleContext
from infra.waiting import WaitedTooLong
from producers import ranking as ranking_module
from producers.ranker.ranker import Question, Ranker, question_of
from producers.ranker.states import States
from producers.ranking import Ranking
from producers.sample_feed import FeederRoots, SampleFeed
from producers.tasks import TaskError
from schemas.messages import EVAL, Sample, StepRecord
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec
from tests.feeding import make_prompt, make_step
from tests.waiting import wait_until

SPEC = make_spec(algorithm={"groups": 4, "group_size": 2, "iterations": 9}, deadlines={"progress_s": 20})
QUESTIONS = [question_of(str(number), None, [number % 5, number % 3]) for number in range(36)]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights are published here; these are what made the samples."""
    monkeypatch.setattr("producers.sample_feed.FeederRoots._published", lambda self, version: "r")


def question(problem: str) -> Question:
    if int(problem) >= len(QUESTIONS):
        raise TaskError(f"problem {problem}")
    return QUESTIONS[int(problem)]


@contextmanager
def ranking(context: RoleContext, wanted: int = 0) -> Iterator[Ranking]:
    feed = SampleFeed(context, {}, 0, FeederRoots(context)).open()
    feed.admitted(make_prompt(SPEC, group) for group in range(36))
    service = Ranking(context, question, feed, wanted=wanted).open()
    feed.read_back()
    feed.follow()
    try:
        yield service
    finally:
        service.close()
        feed.close()


def samples_of(iteration: int) -> list[Sample]:
    return [
        make_sample(SPEC, group, index)
        for group in range(iteration * 4, iteration * 4 + 4)
        for index in range(2)
    ]


def step(iteration: int) -> StepRecord:
    return make_step(SPEC, iteration, samples_of(iteration))


def publish(context: RoleContext, iteration: int, *, seed: int = 0) -> None:
    """All samples of an iteration, in some order."""
    samples = samples_of(iteration)
    random.Random(seed).shuffle(samples)
    for sample in samples:
        context.writer.send(
            context.topics.samples, encode(sample), key=sample.id, partition=sample.length_class
        )


def bits(ranker: Ranker) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in ranker.arrays().items()}


def test_the_order_of_samples_and_restarts_change_nothing(tmp_path: Path) -> None:
    def run(folder: str, seed: int, restarts: bool) -> list[dict[str, bytes]]:
        context = make_context(SPEC, tmp_path / folder)
        found = []
        if restarts:
            for version in range(4):
                if version:
                    publish(context, version - 1, seed=seed + version)
                with ranking(context, wanted=version) as service:
                    for iteration in range(service.begins, version):
                        service.trained(step(iteration))
                    found.append(bits(service.at(version)))
            return found
        with ranking(context) as service:
            for version in range(4):
                if version:
                    publish(context, version - 1, seed=seed + version)
                    service.trained(step(version - 1))
                found.append(bits(service.at(version)))
        return found

    undisturbed = run("one", 0, restarts=False)
    assert run("two", 50, restarts=True) == undisturbed
    assert len({tuple(one.values()) for one in undisturbed}) == 4


def test_what_the_store_lacks_is_learned_from_the_ledger(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    states = States.of_run(context.store, context.run)
    with ranking(context) as service:
        for iteration in range(3):
            publish(context, iteration)
            service.trained(step(iteration))
        last = bits(service.at(3))
        wait_until(lambda: states.numbers() == [0, 1, 2, 3], what="the states")
    context.store.put(states.key(3), b"damaged")
    context.store.delete(states.key(2))
    for topic in context.bus.log(context.topics.samples):  # type: ignore[attr-defined]
        topic.clear()  # nothing of it has to be on the samples' log any more
    with ranking(context, wanted=3) as service:
        assert service.begins == 1
        for iteration in range(3):
            service.trained(step(iteration))
        assert bits(service.at(3)) == last


def test_a_version_that_is_too_new_is_not_used(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    with ranking(context) as service:
        publish(context, 0)
        publish(context, 1)
        service.trained(step(0))
        first = bits(service.at(1))
        service.trained(step(1))
        service.at(2)
    with ranking(context, wanted=1) as service:
        service.trained(step(0))
        assert bits(service.at(1)) == first


def test_only_whole_iterations_of_this_run_count(tmp_path: Path) -> None:
    context = make_context(make_spec(**{**SPEC.model_dump(), "deadlines": {"progress_s": 0.6}}), tmp_path)
    strange = [
        make_sample(SPEC, 0, 0, run="other-1"),
        make_sample(SPEC, 77, 0, iteration=0),
        make_sample(SPEC, 0, 9),
        make_sample(SPEC, 1, 0, purpose=EVAL),
    ]
    for sample in strange:
        context.writer.send(context.topics.samples, encode(sample), key=sample.id)
    context.writer.send(context.topics.samples, b"junk", key="junk")
    with ranking(context) as service, pytest.raises(WaitedTooLong, match=r"iteration 0 .*generators"):
        service.at(1)
    context = make_context(SPEC, tmp_path / "whole")
    for sample in strange:
        context.writer.send(context.topics.samples, encode(sample), key=sample.id)
    publish(context, 0)
    publish(context, 0, seed=3)  # delivered twice
    with ranking(context) as service:
        assert service.at(1).version == 1
        assert np.isfinite(service.scores[0].error)


def test_an_unfit_sample_is_never_learned(tmp_path: Path) -> None:
    """It is made again, and only that one counts, as with the trainer."""
    calm = make_context(SPEC, tmp_path / "calm")
    publish(calm, 0)
    with ranking(calm) as service:
        expected = bits(service.at(1))
    context = make_context(SPEC, tmp_path)
    unfit = make_sample(SPEC, 1, 1, length=9, mini=3)
    context.writer.send(context.topics.samples, encode(unfit), key=unfit.id)
    late = make_sample(SPEC, 2, 1, length=12, versions=np.array([5], np.int32))
    context.writer.send(context.topics.samples, encode(late), key=late.id)
    publish(context, 0)
    with ranking(context) as service:
        assert bits(service.at(1)) == expected


def test_what_was_learned_ahead_is_kept_if_the_ledger_says_the_same(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    publish(context, 0)
    publish(context, 1)
    with ranking(context) as service:
        wait_until(lambda: service._newest == 2, what="two iterations that are learned ahead")
        ahead = service._rankers[1], service._rankers[2]
        service.trained(step(0))
        assert service.at(1) is ahead[0]
        service.trained(step(1))
        assert service.at(2) is ahead[1]


def test_what_the_ledger_says_is_learned_in_place_of_what_was_learned_ahead(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    trained = samples_of(0)
    trained[3] = make_sample(SPEC, trained[3].group, trained[3].index, length=13)
    with ranking(context) as service:  # of samples alone
        service.trained(make_step(SPEC, 0, trained))
        service.trained(step(1))
        expected = bits(service.at(2))
    context = make_context(SPEC, tmp_path / "ahead")
    publish(context, 0)
    publish(context, 1)
    states = States.of_run(context.store, context.run)
    with ranking(context) as service:
        wait_until(lambda: service._newest == 2, what="two iterations that are learned ahead")
        assert states.numbers() in ([], [0]), "what is not trained is not kept"
        service.trained(make_step(SPEC, 0, trained))
        service.trained(step(1))
        assert bits(service.at(2)) == expected
        wait_until(lambda: states.numbers() == [0, 1, 2], what="the states")


def test_a_problem_that_the_task_does_not_have_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context(SPEC, tmp_path)
    samples = [
        make_sample(SPEC, group, index, problem_id="99" if group == 2 else str(group))
        for group in range(4)
        for index in range(2)
    ]
    with ranking(context) as service:
        service.trained(make_step(SPEC, 0, samples))
        assert service.at(1).version == 1
        service.trained(make_step(SPEC, 1, [make_sample(SPEC, 4, 0, problem_id="99")]))
        assert service.at(2).version == 2, "nothing of an iteration can be learned from"
    assert "problem 99; the ranker does not learn from it" in caplog.text


def test_iterations_that_the_ledger_has_lost_are_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context(SPEC, tmp_path)
    with ranking(context) as service:
        service.trained(step(5))
        assert service.at(6).version == 6
    assert "the ledger has no steps of iterations 0 to 4" in caplog.text


def test_its_memory_does_not_grow(tmp_path: Path) -> None:
    spec = make_spec(algorithm={"groups": 4, "group_size": 2, "iterations": 10_000})
    context = make_context(spec, tmp_path)
    feed = SampleFeed(context, {}, 0, FeederRoots(context)).open()
    service = Ranking(context, lambda problem: QUESTIONS[int(problem) % 36], feed, wanted=0).open()
    try:
        for iteration in range(60):
            service.trained(step(iteration))
            service.at(iteration + 1)
        kept = ranking_module.kept_versions(context)
        sizes = [
            len(one)
            for one in (service._rankers, service.scores, service._ahead, service._ledger, service._learned)
        ]
        assert max(sizes) <= kept + 2, sizes
    finally:
        service.close()
        feed.close()


def test_a_store_that_fails_costs_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = make_context(SPEC, tmp_path)
    (tmp_path / "store" / "runs" / context.run).mkdir(parents=True)
    (tmp_path / "store" / "runs" / context.run / "ranker").write_text("a file where a folder should be")
    publish(context, 0)
    with ranking(context) as service:
        service.trained(step(0))
        assert service.at(1).version == 1
        wait_until(lambda: "ranker 1 can't be stored" in caplog.text, what="a warning")

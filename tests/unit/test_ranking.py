"""The ranker on the log: it learns iteration by iteration, whatever the order, and after any restart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from infra.process import Context
from infra.waiting import WaitedTooLong
from producers.ranker.ranker import Question, Ranker, question_of
from producers.ranker.ranking import Ranking
from producers.ranker.states import States
from producers.tasks import TaskError
from schemas.messages import EVAL
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec

SPEC = make_spec(algorithm={"groups": 4, "group_size": 2, "iterations": 9}, deadlines={"progress_s": 20})
QUESTIONS = [question_of(str(number), None, [number % 5, number % 3]) for number in range(36)]


def question(problem: str) -> Question:
    if int(problem) >= len(QUESTIONS):
        raise TaskError(f"problem {problem}")
    return QUESTIONS[int(problem)]


@contextmanager
def ranking(context: Context, wanted: int = 0) -> Iterator[Ranking]:
    service = Ranking(context, question, [], wanted=wanted)
    try:
        yield service
    finally:
        service.close()


def publish(context: Context, window: int, *, seed: int = 0) -> None:
    """All samples of an iteration, in some order."""
    keys = [(group, index) for group in range(window * 4, window * 4 + 4) for index in range(2)]
    random.Random(seed).shuffle(keys)
    for group, index in keys:
        sample = make_sample(SPEC, group, index)
        context.writer.send(
            context.topics.samples, encode(sample), key=sample.id, partition=sample.length_class
        )


def bits(ranker: Ranker) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in ranker.arrays().items()}


def test_the_order_of_samples_and_restarts_change_nothing(tmp_path: Path) -> None:
    def run(folder: str, seed: int, restarts: bool) -> list[dict[str, bytes]]:
        context = make_context(SPEC, tmp_path / folder)
        found = []
        for version in range(4):
            if version:
                publish(context, version - 1, seed=seed + version)
            if restarts or not version:
                service = Ranking(context, question, [], wanted=version)
            found.append(bits(service.at(version)))
            if restarts:
                service.close()
        service.close()
        return found

    undisturbed = run("one", 0, restarts=False)
    assert run("two", 50, restarts=True) == undisturbed
    assert len({tuple(one.values()) for one in undisturbed}) == 4


def test_what_the_store_lacks_is_learned_from_the_log(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    with ranking(context) as service:
        for window in range(3):
            publish(context, window)
        last = bits(service.at(3))
    states = States.of_run(context.store, context.run)
    assert states.numbers() == [0, 1, 2, 3]
    context.store.put(states.key(3), b"damaged")
    context.store.delete(states.key(2))
    with ranking(context, wanted=3) as service:
        assert bits(service.at(3)) == last


def test_a_version_that_is_too_new_is_not_used(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    with ranking(context) as service:
        publish(context, 0)
        publish(context, 1)
        first = bits(service.at(1))
        service.at(2)
    with ranking(context, wanted=1) as service:
        assert bits(service.at(1)) == first


def test_only_whole_iterations_of_this_run_count(tmp_path: Path) -> None:
    context = make_context(make_spec(**{**SPEC.model_dump(), "deadlines": {"progress_s": 0.6}}), tmp_path)
    strange = [
        make_sample(SPEC, 0, 0, run="other-1"),
        make_sample(SPEC, 77, 0, window=0),
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


def test_a_sample_of_an_unknown_problem_ends_the_feeder_with_its_name(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    for group in range(4):
        for index in range(2):
            sample = make_sample(SPEC, group, index, problem_id="99")
            context.writer.send(context.topics.samples, encode(sample), key=sample.id)
    with ranking(context) as service, pytest.raises(TaskError, match="problem 99"):
        service.at(1)


def test_a_store_that_fails_costs_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = make_context(SPEC, tmp_path)
    (tmp_path / "store" / "runs" / context.run).mkdir(parents=True)
    (tmp_path / "store" / "runs" / context.run / "ranker").write_text("a file where a folder should be")
    publish(context, 0)
    with ranking(context) as service:
        assert service.at(1).version == 1
    assert "ranker 1 is not kept" in caplog.text

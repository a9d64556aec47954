"""Feeder and trainer in compressed time: what takes many deadlines goes on while anything moves anywhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from consumers.learners.learner import TorchLearner
from consumers.trainer import Trainer
from infra.liveness import Pulses, Pulsing
from infra.roles.context import RoleContext
from infra.roles.heart import Heart
from infra.waiting import WaitedTooLong
from producers.feeder import Feeder
from tests.factories import make_context, make_spec, make_tiny_model
from tests.waiting import wait_until

DEADLINE_S = 2.0
PROBLEMS = [{"id": str(number), "prompt": f"{number}:"} for number in range(8)]


@contextlib.contextmanager
def moving(context: RoleContext, role: str) -> Iterator[Callable[[], None]]:
    """A process beside the one under test, which moves until it is told to stop."""
    heart, stop = Heart(context.run, role, 9), threading.Event()
    heart.working("at work")

    def run() -> None:
        while not stop.wait(0.05):
            heart.counters["moved"] = heart.counters.get("moved", 0) + 1
            heart.beat(context.writer, context.topics)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield stop.set
    finally:
        stop.set()
        thread.join()


def goes_on_then_ends(context: RoleContext, work: Callable[[], Any], other: str) -> str:
    """What `work` says when it ends: not while another process moves, and soon after that stops."""
    ended: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with moving(context, other) as still:
        thread.start()
        thread.join(3 * DEADLINE_S)
        assert not ended, ended
        still()
        wait_until(lambda: ended, what="its end", deadline_s=30)
    thread.join()
    assert isinstance(ended[0], WaitedTooLong)
    return str(ended[0])


def slow(folder: Path, role: str, **sections: Any) -> RoleContext:
    return make_context(make_spec(deadlines={"progress_s": DEADLINE_S}, **sections), folder, role=role)


@pytest.mark.parametrize("problems", [0, 2])
def test_a_feeder_waits_for_a_long_step_and_for_a_long_evaluation(problems: int, tmp_path: Path) -> None:
    context = slow(tmp_path, "feeder", evaluation={"problems": problems})
    context.signs = Pulsing(
        context.bus, context.writer, context.topics, context.run, deadline_s=DEADLINE_S
    ).open()  # fmt: skip
    feeder = Feeder(context, PROBLEMS, PROBLEMS[:problems], lambda text: [2] * len(text)).open()
    said = goes_on_then_ends(context, feeder.run, "generator")
    assert ("held-out samples of version 0" if problems else "the next optimizer step") in said
    assert "Nothing moves anywhere: generator-9 says that it is at work, but shows no progress" in said
    context.signs.close()


def test_a_trainer_waits_for_long_answers(tmp_path: Path) -> None:
    context = slow(tmp_path, "trainer")
    pulsing = Pulsing(context.bus, context.writer, context.topics, context.run, deadline_s=DEADLINE_S).open()
    context.signs = Pulses(context.bus, context.topics, context.run, deadline_s=DEADLINE_S).open()
    learner = TorchLearner(str(make_tiny_model(Path(context.record.model))), context.spec)
    said = goes_on_then_ends(context, Trainer(context, learner).run, "generator")
    assert "for samples of iteration 0 without progress; the generators would unblock it" in said
    pulsing.close()
    context.signs.close()

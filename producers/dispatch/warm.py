"""Compiles the code that chooses plans in a thread: that takes seconds, and slots are filled meanwhile."""

from __future__ import annotations

import threading

import numpy as np

from infra.background import Background
from producers.dispatch.beliefs import ENOUGH, Beliefs
from producers.dispatch.curve import LatencyCurve
from producers.dispatch.deadline import DeadlinePolicy, DeadlineRule
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from schemas.messages import TRAIN, Prompt

_SAMPLES = 3  # of a group


class WarmUp:
    """Tells whether all is compiled. The first call starts compiling."""

    def __init__(self) -> None:
        self._thread: Background | None = None
        self._done = threading.Event()

    def __call__(self) -> bool:
        if self._thread is None:
            self._thread = Background(self._run, "compile")
            self._thread.start()
        self._thread.check()
        return self._done.is_set()

    def _run(self) -> None:
        choose_once()
        self._done.set()


def choose_once() -> None:
    """Choose a plan for a few jobs, by the same code as for many."""
    beliefs = Beliefs(1000)
    beliefs.observe([[(float(length), length * (1.1 + length % 2))] * 2 for length in range(ENOUGH)])
    policy = DeadlinePolicy(GroupBeliefs(beliefs), replans=1, moves="always")
    dispatcher = Dispatcher(policy)
    table = LatencyCurve((1, 2), (0.01, 0.02)).table(2)
    for name in ("a", "b"):
        dispatcher.join(name, 2, table, 0.0)
    dispatcher.admit(_group(0) + _group(1), 0.0)
    dispatcher.turn(0.0)
    policy.plan = DeadlineRule(0.5, 100.0, 100.0)
    dispatcher.finished((1, 0), 220, 1.0)
    dispatcher.turn(1.0)
    dispatcher.admit(_group(2), 1.0)
    dispatcher.turn(1.0)
    dispatcher.finished((1, 1), 220, 1.0)


def _group(group: int) -> list[SampleJob]:
    prompt = Prompt(
        run="warm", purpose=TRAIN, group=group, size=_SAMPLES, problem_id="", problem="", epoch=0,
        tokens=np.zeros(0, np.int32), iteration=0, mini=0, bundle=group, bundle_groups=1, min_version=0,
        predicted=float(100 + 100 * group), predictor="", length_class=0, edges=[], admitted_at=0.0,
    )  # fmt: skip
    return [SampleJob(prompt, index) for index in range(_SAMPLES)]

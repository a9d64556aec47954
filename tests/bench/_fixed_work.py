"""The same work of an engine and of a learner again and again: how fast the machine is at the moment.

A shared machine is a tenth or more faster in one hour than in another. The processes start once and sleep
between two looks, each of which takes some seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from flows.planning.measuring import engine_and_learner, read_prompts
from flows.planning.measuring_engine import Cell, cell_order
from flows.planning.measuring_learner import made_up
from flows.planning.profiled_learner import ProfiledLearner
from flows.run.locations import Places
from producers.engines.remote_profile import ProfiledEngine
from producers.engines.step_timing import TimedDraw
from schemas.runspec import RunSpec

_CELLS = (Cell(16, 60), Cell(256, 60))  # samples, and tokens of each
_ANSWERS = (5, 10, 20, 40, 80)  # tokens of the answers that are trained
_CALLS = 6
_MOST_S = 5.0


class FixedWork:
    """An engine and a learner that do it."""

    def __init__(self, engine: ProfiledEngine, learner: ProfiledLearner, spec: RunSpec, model: Path) -> None:
        self._engine, self._learner = engine, learner
        prompts = read_prompts(spec, str(model))
        self._orders: list[TimedDraw] = [
            cell_order(cell, number, prompts, spec, _MOST_S) for number, cell in enumerate(_CELLS)
        ]
        samples = made_up(spec, prompts, _ANSWERS)
        learner.take(samples.records)
        by_size = sorted(samples.bundles, key=lambda one: len(one.repeats[0]))
        self._calls = [by_size[len(by_size) // 2].repeats[0]] * _CALLS
        self.seconds()  # the first steps choose kernels and take memory

    def seconds(self) -> float:
        """Do it. Return the mean of the seconds of a step with few samples, one with many, and a call."""
        found = []
        for order in self._orders:
            table, _ = self._engine.draw(order)
            found.append(float(np.median(table.seconds)))
        self._learner.begin_training(self._calls)
        found.append(float(np.median(self._learner.trained().seconds)))
        return float(np.exp(np.mean(np.log(found))))


@contextmanager
def fixed_work(spec: RunSpec, model: Path, folder: Path) -> Iterator[FixedWork]:
    """Start engine and learner for it."""
    places = Places("", f"file://{folder}/fixed-work")
    with engine_and_learner(spec, model, places, "") as (engine, learner):
        yield FixedWork(engine, learner, spec, model)

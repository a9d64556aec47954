"""The real trainer, with a watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from consumers.learners.learner import TorchLearner
from consumers.steps.step_metrics import OptimizerUpdate
from consumers.steps.step_record import StepParts
from consumers.stream.sample_stream import Stream
from consumers.trainer import Trainer
from infra.stack import local
from schemas.messages import StepRecord
from schemas.runspec import RunSpec
from tests.bench._arrivals import Arrivals

WARM = 2  # iterations that are not counted
BLOCK = 4  # iterations that are compared together


class TimedTrainer(Trainer):
    """Notes when steps were done, how long it waited in them, and how long it stood still for checkpoints.

    `between`: called after every so many steps with their numbers, when all is published: to be compared.
    """

    def __init__(
        self, spec: RunSpec, model: Path, stack: local.Stack, between: Callable[[range], None] | None = None
    ) -> None:
        self.arrivals = Arrivals(spec, model, stack)
        super().__init__(self.arrivals.context, TorchLearner(str(model), spec))
        self._between, self._began = between, 0.0
        self.took: list[float] = []
        self.done: list[float] = []
        self.waited: list[float] = []
        self.stalls: list[float] = []
        self.padding: list[float] = []
        self.stepped = threading.Semaphore(0)

    def _train_step(self, stream: Stream) -> None:
        if self._number % BLOCK == 0:
            self._began = time.perf_counter()
        super()._train_step(stream)
        self.stepped.release()
        if self._between is not None and self._number % BLOCK == 0:
            self._publisher.drain()
            self.took.append((time.perf_counter() - self._began) / BLOCK)
            self._between(range(self._number - BLOCK, self._number))

    def _record(self, step: StepParts, root: str, done: OptimizerUpdate) -> StepRecord:
        record = super()._record(step, root, done)
        self.done.append(record.finished_at)
        self.waited.append(record.metrics["waited_s"])
        self.padding.append(record.metrics["padding_waste"])
        return record

    def _checkpoint(self, stream: Stream) -> None:
        began = time.perf_counter()
        super()._checkpoint(stream)
        self.stalls.append(time.perf_counter() - began)

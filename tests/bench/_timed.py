"""The real trainer, with a watch."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from consumers.learner import TorchLearner
from consumers.stream import Stream
from consumers.trainer import Trainer
from infra.stack import local
from schemas.messages import StepRecord
from schemas.runspec import RunSpec
from tests.bench._arrivals import Arrivals

WARM = 2  # iterations that are not counted


class TimedTrainer(Trainer):
    """Notes when steps were done, how long it waited in them, and how long it stood still for checkpoints."""

    def __init__(self, spec: RunSpec, model: Path, stack: local.Stack) -> None:
        self.arrivals = Arrivals(spec, model, stack)
        super().__init__(self.arrivals.context, TorchLearner(str(model), spec))
        self.done: list[float] = []
        self.waited: list[float] = []
        self.stalls: list[float] = []
        self.padding: list[float] = []
        self.stepped = threading.Semaphore(0)

    def _report(self, record: StepRecord, stream: Stream) -> None:
        super()._report(record, stream)
        self.done.append(record.finished_at)
        self.waited.append(record.metrics["waited_s"])
        self.padding.append(record.metrics["padding_waste"])
        self.stepped.release()

    def _checkpoint(self, stream: Stream) -> None:
        began = time.perf_counter()
        super()._checkpoint(stream)
        self.stalls.append(time.perf_counter() - began)

"""How much of its time the trainer waits, when generation takes as long as training in the mean, with jitter.

Iteration t begins to be generated when version t - k is there and iteration t - 1 is generated. It takes a
step's time, times a random factor; its samples come on the way, by their lengths, or all at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infra.stack import local
from schemas.messages import Sample
from schemas.runspec import RunSpec
from tests.bench._timed import WARM, TimedTrainer

JITTER = 0.3  # of the logarithm of the factor
WAYS = ((0, False), (0, True), (1, True), (2, True), (4, True))  # staleness, streamed


def idle(
    spec: RunSpec, model: Path, stack: local.Stack, iterations: Sequence[Sequence[Sample]], step_s: float
) -> list[dict[str, Any]]:
    """A row for each way; all with the same factors."""
    draw = np.random.default_rng(spec.seed)
    took = step_s * np.exp(draw.normal(-JITTER * JITTER / 2, JITTER, len(iterations)))
    return [
        {
            "staleness": staleness,
            "streamed": streamed,
            "idle": _share(TimedTrainer(spec, model, stack), iterations, took, staleness, streamed=streamed),
        }
        for staleness, streamed in WAYS
    ]


def _share(
    trainer: TimedTrainer, iterations: Sequence[Sequence[Sample]], took: np.ndarray, staleness: int, *,
    streamed: bool,
) -> float:  # fmt: skip
    def generate() -> None:
        for number, samples in enumerate(iterations):
            if number > staleness:
                trainer.stepped.acquire()
            longest = max(sample.true_length for sample in samples)
            parts = [sample.true_length / longest if streamed else 1.0 for sample in samples]
            trainer.arrivals.send(samples, [float(took[number]) * part for part in parts])

    generating = threading.Thread(target=generate, daemon=True)
    generating.start()
    trainer.run()
    generating.join()
    return sum(trainer.waited[WARM:]) / (trainer.done[-1] - trainer.done[WARM - 1])

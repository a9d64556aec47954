"""Prices of a step's record for a replay: at the step itself, and to take the step again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np

from consumers.batches.micro_batches import plan
from consumers.batches.training_rows import TrainingRow
from consumers.learners import optimizing
from consumers.learners.fingerprint import NOTHING
from consumers.learners.learner import TorchLearner
from consumers.losses import objective
from consumers.steps.redo import update
from consumers.steps.stage_marks import stage_marks
from flows.run.replaying import replaying
from infra.stack import local
from schemas.messages import Sample
from schemas.runspec import RunSpec
from tests.bench._timed import BLOCK, TimedTrainer


def recorder_over_bare(
    spec: RunSpec, model: Path, iterations: Sequence[Sequence[Sample]], *, pairs: int
) -> float:
    """Processor time of a step with all that is computed for its record alone, over the same step without."""
    learner = TorchLearner(str(model), spec)
    rows = [[TrainingRow(sample, 0, place) for place, sample in enumerate(samples)] for samples in iterations]
    plans = [plan(some, learner.loss, spec.trainer.microbatch_tokens, 0).batches for some in rows]

    def took(number: int, *, recorded: bool) -> float:
        began = time.process_time()
        with nullcontext() if recorded else _without_record():
            stats = learner.accumulate(plans[number])
            done = update(learner, rows[number], number, any_gradient=True)
            root = learner.made().root
            if recorded:
                stage_marks(rows[number], plans[number], stats, done, root)
        return time.process_time() - began

    took(0, recorded=True)  # the first is slower
    ratios = []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        of = {recorded: took(pair % len(rows), recorded=recorded) for recorded in order}
        ratios.append(of[True] / of[False])
    return statistics.median(ratios)


@contextmanager
def _without_record() -> Iterator[None]:
    with (
        patch.object(optimizing, "fingerprint", lambda vector: NOTHING),
        patch.object(objective, "means_of", lambda values, batch: np.zeros(batch.packing.sequences)),
        patch.object(objective, "_largest", lambda values, batch: []),
        patch.object(objective, "xxh3_64_intdigest", lambda values: 0),
    ):
        yield


def replay_over_step(
    spec: RunSpec, model: Path, stack: local.Stack, iterations: Sequence[Sequence[Sample]]
) -> dict[str, float]:
    """Train samples that are all there with the whole trainer, and take its steps again.

    Neither waits for a generator, and nothing else is at work: a replay is compared with a trainer at its
    best. The first steps of both are not counted.
    """
    samples = [sample for some in iterations for sample in some]
    trainer = TimedTrainer(spec, model, stack, between=lambda steps: None)
    trainer.arrivals.send(samples, [0.0] * len(samples))
    trainer.run()
    run, store = trainer.arrivals.context.run, trainer.arrivals.context.store.url
    with replaying(run, store, lambda done, total: None) as opened:
        again, since = [], time.perf_counter()
        for found in opened.again.each(0, len(iterations) - 1):
            if not found.equal:
                raise RuntimeError(f"step {found.record.step} came to other bits")
            again.append(time.perf_counter() - since)
            since = time.perf_counter()
    blocks = [statistics.mean(again[at : at + BLOCK]) for at in range(0, len(again), BLOCK)]
    ratios = [ours / step for ours, step in zip(blocks, trainer.took, strict=True)][1:]
    return {"replay_over_step": statistics.median(ratios), "step_s": statistics.median(trainer.took[1:])}

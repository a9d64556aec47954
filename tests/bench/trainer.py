"""The trainer alone: what streaming leaves to do after the last sample, and what its guarantees cost.

The demo's model, prompts and answers; this process sends the samples to a real broker, and the real trainer
trains them. Iterations alternate, so that a slow moment of the machine meets both kinds:

    streamed    a sample comes when it would be made: after a time that grows with its length
    unstreamed  all samples come at once, and are trained as one

tail_over_unstreamed: from the last arrival to the step done, streamed over unstreamed.
overhead_over_bare:   steps of the whole trainer on samples that are all there, until all is published, over
                      model, loss and optimizer alone; in turn, four steps each, in the same micro-batches.
exact_over_float:     the same step with gradients added in fixed point, over added as floats.
admission_over_arrival: in the smaller micro-batches that are decided at admission, so that a step has the
                      same bits whatever comes first, over all that is there together.
zero1_over_ddp:       DeepSpeed ZeRO-1 on two ranks over DistributedDataParallel on two (`_zero.py`).
checkpoint_stall:     how long training stands still for a checkpoint, over the time of a step.
idle:                 the share of its time that the trainer waits, by staleness, see `_idle.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console

from consumers.batches.micro_batches import plan
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from flows.run.commands import allocator
from infra.stack import local
from schemas.messages import Sample
from schemas.runspec import RunSpec
from tests.bench._arrivals import model_of, samples_of, spec_of
from tests.bench._idle import idle
from tests.bench._runs import own_stack
from tests.bench._timed import WARM, TimedTrainer
from tests.bench._zero import zero_against_ddp

FLOATS = "trainer.exact_sums=false"
ADMISSION, ARRIVAL = "trainer.compose=admission", "trainer.compose=arrival"
_BEGUN = "STREAMRL_BENCH_ALLOCATOR"
SPREAD = 3.0  # the last sample comes after so many times the unstreamed step


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench trainer")
    parser.add_argument("--iterations", type=int, default=12 if quick else 32)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(argv)
    _as_a_trainer()
    torch.set_num_threads(given.threads)
    ways = {
        "admission": spec_of(given.iterations, ADMISSION),
        "arrival": spec_of(given.iterations, ARRIVAL),
        "float": spec_of(given.iterations, ARRIVAL, FLOATS),
    }
    model = model_of(ways["admission"])
    # The same samples, of which admission has decided, or has not, what is trained together.
    bundled, loose = (samples_of(ways[compose], model) for compose in ("admission", "arrival"))
    found: dict[str, Any] = {"samples": sum(map(len, bundled)), "tokens": _tokens(bundled)}
    with own_stack() as stack:
        found |= _tails(ways["admission"], model, stack, bundled, "")
        found |= _tails(ways["arrival"], model, stack, loose, "arrival_")
        samples = {"admission": bundled, "arrival": loose, "float": loose}
        found |= _costs({name: (ways[name], of) for name, of in samples.items()}, model, stack)
        found["idle"] = idle(ways["arrival"], model, stack, loose, found["arrival_unstreamed_s"])
    found["zero1_over_ddp"] = zero_against_ddp(str(model), rounds=4 if quick else 12)["ratio"]
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}
    Console(stderr=True).print(rounded)
    return rounded


def _as_a_trainer() -> None:
    """Begin again with the memory allocator that a trainer's process has: it can't be changed later."""
    if not os.environ.get(_BEGUN):
        env = {**os.environ, **allocator(), _BEGUN: "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.bench", *sys.argv[1:]], env)


def _tokens(iterations: Sequence[Sequence[Sample]]) -> int:
    return sum(sample.true_length for samples in iterations for sample in samples)


def _tails(
    spec: RunSpec, model: Any, stack: local.Stack, iterations: Sequence[Sequence[Sample]], prefix: str
) -> dict[str, float]:
    """Streamed and unstreamed iterations in turn."""
    trainer = TimedTrainer(spec, model, stack)
    sent: list[float] = []

    def feed() -> None:
        step_s = 0.3
        for number, samples in enumerate(iterations):
            longest = max(sample.true_length for sample in samples)
            spread = SPREAD * step_s if number % 2 else 0.0
            sent.append(trainer.arrivals.send(samples, [spread * s.true_length / longest for s in samples]))
            trainer.stepped.acquire()
            if not number % 2:
                step_s = trainer.done[-1] - sent[-1]

    feeding = threading.Thread(target=feed, daemon=True)
    feeding.start()
    trainer.run()
    feeding.join()
    left = np.array(trainer.done) - np.array(sent)
    unstreamed, streamed = left[WARM::2], left[WARM + 1 :: 2]
    return {
        f"{prefix}tail_over_unstreamed": float(np.median(streamed) / np.median(unstreamed)),
        f"{prefix}unstreamed_s": float(np.median(unstreamed)),
        f"{prefix}padding_waste": float(np.mean(trainer.padding[WARM:])),
    }


def _costs(
    ways: Mapping[str, tuple[RunSpec, Sequence[Sequence[Sample]]]], model: Any, stack: local.Stack
) -> dict[str, float]:
    """The trainer with all samples there, in several ways; after some steps bare ones on the same samples."""
    over_bare, step_s = {}, {}
    stalls: list[float] = []
    for name, (spec, iterations) in ways.items():
        bare = _Bare(ways["float"][0], str(model), iterations)
        trainer = TimedTrainer(spec, model, stack, bare.steps)
        samples = [sample for some in iterations for sample in some]
        trainer.arrivals.send(samples, [0.0] * len(samples))
        trainer.run()
        over_bare[name] = float(np.median(np.divide(trainer.took, bare.took)[1:]))
        step_s[name] = float(np.median(trainer.took[1:]))
        stalls += [stall / step_s[name] for stall in trainer.stalls if stall > 1e-4]
    return {
        "overhead_over_bare": over_bare["arrival"],
        "exact_over_float": over_bare["arrival"] / over_bare["float"],
        "admission_over_arrival": over_bare["admission"] / over_bare["arrival"],
        "step_s": step_s["arrival"],
        "checkpoint_stall": float(np.mean(stalls)),
    }


class _Bare:
    """Model, loss and optimizer on samples in memory; floats are summed as they come."""

    def __init__(self, spec: RunSpec, model: str, iterations: Sequence[Sequence[Sample]]) -> None:
        self._learner, self._iterations = TorchLearner(model, spec), iterations
        self._budget = spec.trainer.microbatch_tokens
        self.took: list[float] = []

    def steps(self, numbers: range) -> None:
        """Some iterations."""
        began = time.perf_counter()
        for samples in (self._iterations[number] for number in numbers):
            rows = [TrainingRow(sample, 0, place) for place, sample in enumerate(samples)]
            self._learner.accumulate(plan(rows, self._learner.loss, self._budget, 0).batches)
            self._learner.step(self._learner.loss.total(samples))
        self.took.append((time.perf_counter() - began) / len(numbers))

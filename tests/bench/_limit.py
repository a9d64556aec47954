"""How fast the very samples of a run can be generated, and trained, each alone on one core."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence

import torch

from consumers.batches.micro_batches import plan
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from producers.engines.engine import SampleRequest
from producers.engines.vllm_in_process import VllmEngine
from schemas.messages import Sample
from schemas.runspec import RunSpec


def generation_s(
    spec: RunSpec, engine: VllmEngine, iterations: Sequence[Sequence[Sample]]
) -> tuple[float, float]:
    """Seconds to generate samples of these lengths, for a trainer that takes no time at all.

    First bounded: an iteration may begin when the one that lies `staleness + 1` before it is whole, as in the
    run. Then as if all were there from the start.
    """
    _fix_lengths(engine)
    _generate(engine, spec.generator.slots, iterations[:1], 1, "w")  # the first one warms up
    times = [time.perf_counter()]
    for mark, ahead in (("b", math.floor(spec.algorithm.lookahead) + 1), ("u", len(iterations))):
        _generate(engine, spec.generator.slots, iterations, ahead, mark)
        times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1]


def _fix_lengths(engine: VllmEngine) -> None:
    """From now on it goes on to the wanted length whatever is drawn."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine._params = lambda tokens: SamplingParams(
        max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def _generate(
    engine: VllmEngine, slots: int, iterations: Sequence[Sequence[Sample]], ahead: int, mark: str
) -> None:
    missing = [len(samples) for samples in iterations]
    home: dict[str, int] = {}
    waiting: list[tuple[int, float, str, Sample]] = []
    admitted = whole = 0
    while whole < len(iterations):
        while admitted < min(len(iterations), whole + ahead):
            for sample in iterations[admitted]:
                name = f"{mark}{sample.id}"
                home[name] = admitted
                heapq.heappush(waiting, (admitted, -sample.predicted, name, sample))
            admitted += 1
        while waiting and len(engine.unfinished()) < slots:
            _, _, name, sample = heapq.heappop(waiting)
            engine.submit(
                SampleRequest(name, sample.prompt_tokens.tolist(), sample.true_length, 1, sample.predicted)
            )
        for finished in engine.step():
            missing[home[finished.id]] -= 1
        while whole < len(iterations) and missing[whole] == 0:
            whole += 1


def training_s(spec: RunSpec, model: str, iterations: Sequence[Sequence[Sample]]) -> float:
    """Seconds to train on these samples."""
    learner = TorchLearner(model, spec)
    torch.set_num_threads(1)
    took = 0.0
    for turn, samples in enumerate([iterations[0], *iterations]):
        rows = [TrainingRow(sample, 0, number) for number, sample in enumerate(samples)]
        began = time.perf_counter()
        train_iteration(learner, spec, rows)
        learner.weights()
        if turn:  # the first one warms up
            took += time.perf_counter() - began
    return took


def train_iteration(learner: TorchLearner, spec: RunSpec, rows: Sequence[TrainingRow]) -> None:
    """All optimizer steps of an iteration, on samples that are all there."""
    for mini in range(spec.algorithm.optimizer_steps):
        mine = [row for row in rows if row.sample.mini == mini]
        learner.accumulate(plan(mine, learner.loss, spec.trainer.microbatch_tokens, 0).batches)
        learner.step(learner.loss.total([row.sample for row in mine]))

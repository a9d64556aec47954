"""How fast the very samples of a run can be generated, and trained, each alone on one core."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from consumers.batching import plan, token_weight
from consumers.learner import TorchLearner
from consumers.stream import Row
from producers.engines.base import Request
from producers.engines.vllm_engine import VllmEngine
from schemas.messages import Sample
from schemas.runspec import RunSpec


class _FixedLengths(VllmEngine):
    """Goes on to the wanted length whatever is drawn."""

    def fix(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._params = lambda tokens: SamplingParams(
            max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )


def generation_s(spec: RunSpec, model: str, iterations: Sequence[Sequence[Sample]]) -> float:
    """Seconds to generate samples of these lengths, iteration after iteration without a pause between."""
    engine = _FixedLengths(
        model, slots=spec.generator.slots, threads=1, kv_cache_mib=spec.generator.kv_cache_mib,
        max_model_len=spec.sampling.max_prompt_tokens + spec.sampling.max_tokens,
        batch_invariant=spec.generator.batch_invariant,
    )  # fmt: skip
    engine.fix()
    torch.set_num_threads(1)
    waiting = [sample for samples in iterations for sample in sorted(samples, key=lambda s: -s.predicted)]
    took = 0.0
    for repeat, queue in enumerate((waiting[:64], waiting)):  # the first ones warm up
        queue = queue[::-1]
        began = time.perf_counter()
        running = 0
        while queue or running:
            while queue and running < spec.generator.slots:
                sample = queue.pop()
                engine.submit(
                    Request(f"{repeat}-{sample.id}", sample.prompt_tokens.tolist(), sample.true_length, 1, 0.0)
                )
                running += 1
            running -= len(engine.step())
        took = time.perf_counter() - began
    return took


def training_s(spec: RunSpec, model: str, iterations: Sequence[Sequence[Sample]]) -> float:
    """Seconds to train on these samples, one optimizer step an iteration."""
    learner = TorchLearner(model, spec)
    torch.set_num_threads(1)
    took = 0.0
    for turn, samples in enumerate([iterations[0], *iterations]):
        rows = [Row(sample, 0, number) for number, sample in enumerate(samples)]
        began = time.perf_counter()
        planned = plan(rows, spec.algorithm, spec.trainer.microbatch_tokens, 0)
        for batch in planned.batches:
            learner.accumulate(batch)
        lengths = [sample.true_length for sample in samples]
        learner.step(sum(length * token_weight(length, spec.algorithm) for length in lengths))
        learner.weights()
        if turn:  # the first one warms up
            took += time.perf_counter() - began
    return took

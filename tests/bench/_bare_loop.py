"""The colocated reference: vLLM generates, torch steps, weights are loaded; one process, nothing overlaps.

The same engine, learner, batching, loss and seeds as ours: what differs is only that there is no stream.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import numpy as np
import torch

from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from producers.engines.engine import SampleRequest
from producers.engines.vllm_in_process import VllmEngine
from producers.planner import Planner
from producers.ranker.ranker import Answered, NoBackbone, Ranker
from producers.tasks import Problem, load_problems, load_reward
from schemas.identity import sample_id, sampling_seed
from schemas.messages import Prompt, Sample, StepRecord
from schemas.runspec import RunSpec
from tests.bench._limit import train_iteration
from tests.factories import make_patch


@dataclass
class Iteration:
    """Times and counts of one iteration."""

    generate_s: float
    train_s: float
    samples: int
    tokens: int
    reward: float


class BareLoop:
    """Generate, train, load, over and over; `threads` for training (more than one only slows generation)."""

    def __init__(self, spec: RunSpec, model: str, engine: VllmEngine, *, threads: int) -> None:
        from transformers import AutoTokenizer

        self._spec, self._threads = spec, threads
        self._engine = engine
        self._learner = TorchLearner(model, spec)
        tokenizer = AutoTokenizer.from_pretrained(model)
        self._text = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)
        self._reward = load_reward(spec.task)
        self._planner = Planner(
            spec.run, spec, load_problems(spec, spec.task.train_split),
            lambda text: tokenizer.encode(text, add_special_tokens=False),
        )  # fmt: skip
        self._ranker = Ranker.fresh(spec.seed, NoBackbone(), typical=spec.sampling.max_tokens / 8)
        self._install()

    def _install(self) -> None:
        self._engine.prepare(make_patch(self._learner.weights()).read())
        self._engine.install(recompute=False)

    def iterate(self, number: int) -> Iteration:
        """One iteration."""
        prompts = self._planner.admit(lambda _: self._ranker)
        torch.set_num_threads(1)
        began = time.perf_counter()
        rows = self._generate(prompts, number)
        generated = time.perf_counter()
        torch.set_num_threads(self._threads)
        train_iteration(self._learner, self._spec, rows)
        self._install()
        done = time.perf_counter()
        samples = [row.sample for row in rows]
        self._planner.observe(_record(number))
        self._ranker = self._ranker.learned(_answered(prompts, samples, self._planner))
        return Iteration(
            generated - began, done - generated, len(rows), sum(s.true_length for s in samples),
            float(np.mean([s.reward for s in samples])),
        )  # fmt: skip

    def evaluate(self, version: int, problems: list[Problem]) -> list[Sample]:
        """Held-out problems, sampled with the weights as they are."""
        torch.set_num_threads(1)
        rows = self._generate(self._planner.evaluate(version, problems, self._ranker), version)
        return [row.sample for row in rows]

    def _generate(self, prompts: list[Prompt], version: int) -> list[TrainingRow]:
        asked: dict[str, tuple[Prompt, int, int]] = {}
        for prompt in prompts:
            for index in range(prompt.size):
                name = sample_id(prompt.group, index)
                seed = sampling_seed(
                    self._spec.seed, self._spec.run, prompt.problem_id, prompt.group, index, 0, version
                )
                asked[name] = prompt, index, seed
                self._engine.submit(
                    SampleRequest(
                        name, prompt.tokens.tolist(), self._spec.sampling.max_tokens, seed, prompt.predicted
                    )
                )
        samples: list[Sample] = []
        while len(samples) < len(asked):
            for made in self._engine.step():
                prompt, index, seed = asked[made.id]
                value = self._reward(json.loads(prompt.problem), self._text(made.tokens))
                parts = value if isinstance(value, dict) else {"reward": value}
                samples.append(_sample(prompt, index, seed, version, made, parts))
        samples.sort(key=lambda sample: (sample.group, sample.index))
        return [TrainingRow(sample, 0, number) for number, sample in enumerate(samples)]


def _sample(
    prompt: Prompt, index: int, seed: int, version: int, made: object, parts: dict[str, float]
) -> Sample:
    return Sample(
        run=prompt.run, purpose=prompt.purpose, group=prompt.group, index=index, attempt=0, size=prompt.size,
        problem_id=prompt.problem_id, epoch=prompt.epoch, iteration=prompt.iteration, mini=prompt.mini,
        bundle=prompt.bundle, bundle_groups=prompt.bundle_groups, prompt_tokens=prompt.tokens,
        tokens=made.tokens, logprobs=made.logprobs, version_starts=np.zeros(1, np.int32),  # type: ignore[attr-defined]
        versions=np.array([version], np.int32), roots=[""], seed=seed, finish=made.finish,  # type: ignore[attr-defined]
        reward=float(sum(parts.values())), reward_parts=parts, reward_error="", predicted=prompt.predicted,
        length_class=prompt.length_class, min_version=prompt.min_version, generator="bare", admitted_at=0.0,
        started_at=0.0, finished_at=0.0, scored_at=0.0,
    )  # fmt: skip


def _answered(prompts: list[Prompt], samples: list[Sample], planner: Planner) -> list[Answered]:
    """What the ranker learns from."""
    lengths: dict[int, list[int]] = {}
    for sample in samples:
        lengths.setdefault(sample.group, []).append(sample.true_length)
    ordered = sorted(prompts, key=lambda prompt: prompt.group)
    return [Answered(planner.question(p.problem_id), lengths[p.group]) for p in ordered]


def _record(number: int) -> StepRecord:
    """What tells the planner that an iteration is done."""
    none = np.zeros(0)
    return StepRecord(
        run="", trainer_epoch=0, iteration=number, step=number, last_of_iteration=True, version_in=number,
        version_out=number + 1, root_out="", recipe="", partitions=none, offsets=none,
        groups=none, indexes=none, lengths=none, rewards=none, versions=none,
        predicted=none, problem_ids=[], microbatches=none, losses=none, metrics={}, finished_at=0.0,
    )  # fmt: skip

"""Measures a learner: calls with samples of given lengths, in bundles of given sizes, and optimizer steps.

The samples are made up: a model of fixed shape takes as long for any tokens. Rewards alternate within a
group, so that each sample has a gradient. No two calls have the same number of tokens, as in a run: libraries
keep what they have prepared for a shape, and a second call with it would be faster.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from consumers.timed_training import CallTable, StepSeconds
from flows.planning.profiled_learner import ProfiledLearner
from producers.first_prompts import FirstPrompt
from schemas.messages import TRAIN, Sample
from schemas.profile import TrainPoint
from schemas.runspec import RunSpec
from schemas.wire import encode

_REPEATS = 3
_STEPS = 3  # optimizer steps that are measured
_MORE = 3  # tokens by which the repeats of a bundle differ, at least


@dataclass(frozen=True)
class TimedBundle:
    """Samples that are trained in one call: their numbers in each repeat, and whether curves are fitted."""

    repeats: tuple[tuple[int, ...], ...]
    held_out: bool = False


@dataclass
class TrainingSamples:
    """Made up samples of several lengths, and the bundles to time."""

    records: list[bytes] = field(default_factory=list)
    bundles: list[TimedBundle] = field(default_factory=list)


def made_up(spec: RunSpec, prompts: Sequence[FirstPrompt], lengths: Sequence[int]) -> TrainingSamples:
    """Return samples and bundles of them. `lengths`: those of real answers."""
    found = TrainingSamples()
    known = sorted(lengths) or [spec.sampling.max_tokens // 4]
    size, budget = spec.algorithm.group_size, spec.trainer.microbatch_tokens
    typical, longest = max(1, known[len(known) // 2]), spec.sampling.max_tokens
    cycle = itertools.cycle(prompts)
    groups = itertools.count()

    def members(sizes: Iterator[int], tokens: int, off: int) -> Iterator[int]:
        """Make whole groups with about so many tokens, at least one; the first answer differs by `off`."""
        held = 0
        while not held or held < tokens:
            group, prompt = next(groups), next(cycle)
            for index in range(size):
                answer = next(sizes)
                if not held:
                    answer += off if answer <= off else -off
                yield len(found.records)
                found.records.append(encode(_sample(spec, group, index, prompt, answer)))
                held += len(prompt.tokens) + answer

    def bundle(length: Sequence[int], tokens: int, *, held_out: bool = False) -> None:
        """Add a bundle of about so many tokens."""
        sizes = itertools.cycle(length)
        repeats = [tuple(members(sizes, tokens, _MORE * number)) for number in range(_REPEATS)]
        found.bundles.append(TimedBundle(tuple(repeats), held_out))

    step = spec.algorithm.groups // spec.algorithm.optimizer_steps * size * (sum(known) // len(known) + 16)
    least, most = min(spec.trainer.bundle_tokens, budget), min(budget - longest, step)
    for length in sorted({typical, max(1, longest // 3), longest}):
        for tokens in sorted({1, least, min(4 * least, most), most}):
            bundle([length], tokens)
    bundle(known, min(step, 3 * budget))
    for tokens in (least, 3 * least, min(step, 2 * budget) // 2):  # real lengths: held out
        bundle(known[1::2] or known, tokens, held_out=True)
    return found


def _sample(spec: RunSpec, group: int, index: int, prompt: FirstPrompt, length: int) -> Sample:
    moment, tokens = time.time(), np.array(prompt.tokens, dtype=np.int32)
    return Sample(
        run="profile-1", purpose=TRAIN, group=group, index=index, attempt=0, size=spec.algorithm.group_size,
        problem_id=prompt.name, epoch=0, iteration=0, mini=0, bundle=0, bundle_groups=1,
        prompt_tokens=tokens, tokens=np.resize(tokens, length), logprobs=np.full(length, -1.0, np.float32),
        version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32), roots=["0" * 64],
        seed=group * 1000 + index, finish="stop", reward=float(index % 2), reward_parts={}, reward_error="",
        predicted=float(length), length_class=0, min_version=0, generator="profile", admitted_at=moment,
        started_at=moment, finished_at=moment, scored_at=moment,
    )  # fmt: skip


@dataclass
class MeasuredLearner:
    """The measured points of a learner."""

    points: list[TrainPoint]
    read_s: float
    steps: list[StepSeconds]
    snapshot_s: float
    busy_cores: float
    disturbed: float


def measure_learner(
    learner: ProfiledLearner, samples: TrainingSamples, seconds: float
) -> Iterator[float | MeasuredLearner]:
    """Measure a learner in about so many seconds. Yield the share that is done, and in the end the result."""
    read_s = learner.take(samples.records)
    largest = max((one.repeats[0] for one in samples.bundles), key=len)
    learner.begin_training([largest])  # once before anything counts: memory is taken here
    learner.trained()
    learner.step()
    until = time.monotonic() + seconds
    tables: list[list[CallTable]] = [[] for _ in samples.bundles]
    steps: list[StepSeconds] = []
    for turn in range(_REPEATS):
        for number, bundle in enumerate(samples.bundles):
            learner.begin_training([bundle.repeats[turn]])
            tables[number].append(learner.trained())
            yield (turn + (number + 1) / len(samples.bundles)) / _REPEATS
            if turn and time.monotonic() > until:
                break
        if turn < _STEPS:
            steps.append(learner.step())
    snapshot_s = learner.snapshot()
    points = [
        point
        for one, found in zip(samples.bundles, tables, strict=True)
        if (point := train_point(found, held_out=one.held_out)) is not None
    ]
    every = [table for found in tables for table in found]
    took = sum(sum(table.seconds) for table in every)
    yield MeasuredLearner(
        points, read_s, steps, snapshot_s,
        float(np.median([table.busy_cores for table in every])),
        sum(table.disturbed * sum(table.seconds) for table in every) / max(1e-9, took),
    )  # fmt: skip


def train_point(calls: Sequence[CallTable], *, held_out: bool) -> TrainPoint | None:
    """Return the mean of calls that are nearly equal; None if they trained nothing."""
    seconds, tokens, samples, context, micro_batches = (
        np.array([one for table in calls for one in getattr(table, name)], float)
        for name in ("seconds", "tokens", "samples", "context", "micro_batches")
    )
    if not len(seconds):
        return None
    each = seconds / tokens
    kept = each <= 1.5 * np.median(each)
    many = int(kept.sum())
    return TrainPoint(
        samples=round(samples[kept].mean()), tokens=round(tokens[kept].mean()), context=context[kept].mean(),
        micro_batches=round(micro_batches[kept].mean()), calls=many,
        seconds=float(seconds[kept].mean()), held_out=held_out,
        noise=float(each[kept].std(ddof=1) * tokens[kept].mean() / many**0.5) if many > 1 else 0.0,
    )  # fmt: skip

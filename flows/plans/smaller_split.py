"""A smaller run that behaves like a large one: so that simulating a step of 65,536 samples takes no minutes.

all generators ──► an even share of each kind ──► in each engine one sample stands for several

Both make groups, generators or slots fewer, and the trainer's tokens as many times slower, so that each part
is busy for as long as in the large run. The groups are some of the large run's, evenly by their lengths. Only
the tail is that of fewer samples: formulas, which know all of them, say how much longer a step is with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from flows.planning.stage_times import EngineTimes
from flows.planning.step_estimate import GeneratorKind, MachineSplit
from flows.planning.workload import DrawnLengths
from schemas.runspec import RunSpec

_LEAST_GROUPS = 8  # of an iteration
_LEAST_SAMPLES = 256  # of an iteration
_LEAST_GENERATORS = 8  # of more, a share is taken; fewer would share their work too evenly
_LEAST_SLOTS = 8
_LEAST_EACH = 4  # samples that each generator has in flight, on average


@dataclass(frozen=True)
class SmallerRun:
    """A run file and a split whose samples each stand for several."""

    spec: RunSpec
    split: MachineSplit
    factor: float = 1.0  # how many samples of the large run each of them stands for


def smaller_run(spec: RunSpec, split: MachineSplit, iterations: int, most_samples: int) -> SmallerRun:
    """Return a run with about so many samples in its iterations, or the same one if it has no more."""
    algorithm = spec.algorithm
    samples = algorithm.groups * algorithm.group_size
    least = max(_LEAST_SAMPLES, _LEAST_GROUPS * algorithm.group_size)
    wanted = samples / max(least, most_samples / iterations)
    if wanted < 2:
        return SmallerRun(spec, split)
    counts = [count for _, count in split.generators]
    share = _divisor(math.gcd(*counts), min(wanted, max(1.0, sum(counts) / _LEAST_GENERATORS)))
    generators = sum(counts) // share
    for_one = min(
        wanted / share, *(kind.slots / _LEAST_SLOTS for kind, _ in split.generators),
        samples / share / (generators * _LEAST_EACH),
    )  # fmt: skip
    each = max(1, int(for_one))
    groups = max(1, round(algorithm.groups / share / each))
    factor = algorithm.groups / groups
    if factor <= 1:
        return SmallerRun(spec, split)
    trainer = spec.trainer
    batch = max(spec.longest_sample, trainer.bundle_tokens, round(trainer.microbatch_tokens / factor))
    batch = min(batch, trainer.microbatch_tokens)
    learner = split.trainer.learner
    learner = replace(
        learner, token_s=learner.token_s * factor,
        microbatch_s=learner.microbatch_s * factor * batch / trainer.microbatch_tokens,
    )  # fmt: skip
    kinds = tuple(
        (GeneratorKind(kind.pool, _standing_for(kind.engine, each), kind.tensor_parallel), count // share)
        for kind, count in split.generators
    )
    small = spec.model_copy(
        update={
            "algorithm": algorithm.model_copy(update={"groups": groups}),
            "trainer": trainer.model_copy(update={"microbatch_tokens": batch}),
        }
    )
    smaller = replace(split, trainer=replace(split.trainer, learner=learner), generators=kinds)
    return SmallerRun(small, smaller, factor)


def even_lengths(drawn: DrawnLengths, groups: int, fewer: int) -> DrawnLengths:
    """Return some groups of each iteration: evenly from those with short answers to those with long ones."""
    means = drawn.answers.mean(axis=1).reshape(-1, groups)
    places = ((np.arange(fewer) + 0.5) * groups / fewer).astype(int)
    chosen = np.sort(np.argsort(means, axis=1, kind="stable")[:, places], axis=1)
    rows = (chosen + groups * np.arange(len(means))[:, None]).ravel()
    return DrawnLengths(drawn.answers[rows], drawn.prompts[rows], drawn.predicted[rows])


def _divisor(number: int, most: float) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return max(one for one in range(1, int(min(number, most)) + 1) if number % one == 0)


def _standing_for(engine: EngineTimes, many: int) -> EngineTimes:
    """Return an engine each of whose samples does the work of several."""
    slots = math.ceil(engine.slots / many)
    return replace(
        engine, batch_s=tuple(engine.batch_s[min(engine.slots, size * many)] for size in range(slots + 1)),
        context_s=engine.context_s * many, prefill_s=engine.prefill_s * many,
    )  # fmt: skip

"""A generator whose samples are unfit the first time: `python -m tests.fakes.spoiling`."""

from __future__ import annotations

import sys

import msgspec
import numpy as np

from infra.roles.entry import run_role
from producers import generator
from producers.generator_core import MadeSample
from producers.rewards import RewardOutcome
from schemas.messages import TRAIN, Sample

EVERY = 16


class Spoiling(generator.Generator):
    """One of so many samples has logprobs that are none; when it is made again, it is as it should be."""

    _spoilt: frozenset[str] = frozenset()

    def _sample(self, made: MadeSample, score: RewardOutcome) -> Sample:
        sample = super()._sample(made, score)
        number = sample.group * sample.size + sample.index
        if sample.purpose != TRAIN or number % EVERY or sample.id in self._spoilt:
            return sample
        self._spoilt |= {sample.id}
        return msgspec.structs.replace(sample, logprobs=np.full(sample.tokens.size, np.nan, np.float32))


if __name__ == "__main__":
    generator.Generator = Spoiling  # type: ignore[misc]
    sys.exit(run_role("generator", generator.body))

"""Builds assignments: a generator's orders, cut into records of a bounded size.

A record names prompts and parts by their positions, and the generator fetches those that it lacks. So each
prompt goes only to the generators that make its samples, and no prompt is too long for a record.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import numpy as np

from producers.dispatch.jobs import SampleJob
from producers.dispatch.on_the_way import GeneratorStart
from schemas.identity import SampleKey, sample_id
from schemas.messages import EVERYONE, Assignment

MOST_SAMPLES = 1000  # samples of each kind that a record names at most: some 60 KB


def assignments(
    run: str, process: GeneratorStart, jobs: Sequence[SampleJob], withdrawn: Sequence[SampleKey],
    moving: Sequence[SampleKey], *, epoch: int = 0,
) -> Iterator[Assignment]:  # fmt: skip
    """Yield the assignments that give one generator jobs, and tell it what to give back and hand over."""
    for begin in itertools.count(0, MOST_SAMPLES):
        part = slice(begin, begin + MOST_SAMPLES)
        if not (jobs[part] or withdrawn[part] or moving[part]):
            return
        yield _assignment(run, process, jobs[part], withdrawn[part], moving[part], epoch)


def question(run: str, process: GeneratorStart = (EVERYONE, EVERYONE), *, epoch: int = 0) -> Assignment:
    """Return an assignment that asks one generator, or all of them, for a full report."""
    return _assignment(run, process, [], [], [], epoch, tell=True)


def _assignment(
    run: str, process: GeneratorStart, jobs: Sequence[SampleJob], withdrawn: Sequence[SampleKey],
    moving: Sequence[SampleKey], epoch: int, *, tell: bool = False,
) -> Assignment:  # fmt: skip
    places = []
    for job in jobs:
        assert job.place is not None, "a job can be assigned only once its prompt is on the log"
        places.append(job.place)
    return Assignment(
        run=run, generator=process[0], start=process[1],
        partitions=np.array([place.partition for place in places], np.int16),
        offsets=np.array([place.offset for place in places], np.int64),
        groups=np.array([job.prompt.group for job in jobs], np.int64),
        indexes=np.array([job.index for job in jobs], np.int16),
        parts=np.array([job.part_at for job in jobs], np.int64),
        withdrawn=[sample_id(*key) for key in withdrawn], moving=[sample_id(*key) for key in moving],
        sent_at=time.time(), epoch=epoch, tell=tell,
    )  # fmt: skip

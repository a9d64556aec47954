"""Measures some decode steps of an engine before it has work, so the dispatcher knows its speed."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from producers.engines.engine import Decoder, SampleRequest
from producers.engines.pace import StepTimes

_PROFILE_S = 1.5
_WARM, _MEASURED = 2, 10  # steps at each size


class MeasurableEngine(Decoder, Protocol):
    """A local engine whose steps can be measured."""

    @property
    def running(self) -> int:
        """The samples that have a place in the KV cache."""

    def expect(self, times: StepTimes) -> None:
        """Take measured times of steps."""


def profiled_sizes(slots: int) -> list[int]:
    """Return batch sizes to profile, the most useful first, since a long profile is cut short."""
    between = [size for size in (64, 8, 16, 256, 1024) if size < slots]
    return list(dict.fromkeys([1, slots, *between]))


def measure_steps(engine: MeasurableEngine, slots: int) -> None:
    """Measure steps at some sizes of batches, for a moment, and tell the engine."""
    found, sizes = StepTimes(), profiled_sizes(slots)
    end = time.perf_counter() + _PROFILE_S
    for size in sizes:
        tokens = _WARM + _MEASURED + 1
        names = [f"profile-{number}" for number in range(size)]
        for name in names:
            engine.submit(SampleRequest(name, [0], tokens, 0, 0.0, endless=True))
        for _ in range(_WARM):  # these include the prefill and the first use of each kernel
            engine.step(0.0)
        moments = [time.perf_counter()]
        until = moments[0] + _PROFILE_S / len(sizes)
        while len(moments) == 1 or (len(moments) <= _MEASURED and moments[-1] < until):
            engine.step(0.0)
            moments.append(time.perf_counter())
        if engine.running == size:  # else the KV cache holds fewer samples
            found.expect(size, float(np.median(np.diff(moments))))
        engine.abort(names)
        engine.hand_over([])  # takes in the batch that is under way
        if moments[-1] > end:
            break
    engine.expect(found)

"""One iteration in virtual time: real dispatcher and generators, on `ReplayEngine`s that know the lengths.

The dispatcher's own time is charged: whatever it decides reaches the generators as much later as it took to
decide, in seconds of this machine's CPU. The engines go on meanwhile. A plan that is chosen beside is there
as much later as its choice took, and the dispatcher goes on meanwhile, too.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from flows.simulation.virtual_chooser import as_measured, choose_virtually
from infra.weights.digest import digests_of
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.policy import Policy
from producers.engines.engine import SampleRequest
from producers.engines.without_model import ReplayEngine, VirtualClock
from producers.generator_core import Decoding
from producers.installing import VerifiedWeights
from schemas.identity import SampleKey, sample_id, sample_key
from tests.factories import make_patch, make_spec

# A sample that moves is prefilled anew, and nothing else gets on in the meantime: 20,000 tokens a second.
PREFILL_S = 1 / 20_000

_TENSORS = {"w": torch.zeros(1)}
_DIGESTS, _PATCH = digests_of(_TENSORS), make_patch(_TENSORS)


@dataclass(frozen=True)
class Span:
    """A sample on its generator."""

    generator: int
    begin: float
    end: float
    length: int


def generate(
    jobs: Sequence[SampleJob],
    lengths: Mapping[SampleKey, int],
    tables: Sequence[np.ndarray],
    policy: Policy,
    trace: list[Span] | None = None,
    *,
    thinking: bool = True,
) -> float:
    """Seconds until the last sample is finished; all are admitted at the start. `trace` is filled.

    `thinking`: whether the dispatcher's own time is charged.
    """
    clock = VirtualClock()

    def length_of(request: SampleRequest) -> int:
        return lengths[sample_key(request.id)]

    engines = {
        f"g{number:03d}": ReplayEngine(table, length_of, clock, prefill_s=PREFILL_S)
        for number, table in enumerate(tables)
    }
    chooser = choose_virtually(policy, as_measured if thinking else lambda cpu_s: 0.0)
    dispatcher, generators = Dispatcher(policy), dict[str, Decoding]()
    for (name, engine), table in zip(engines.items(), tables, strict=True):
        generators[name] = Decoding(make_spec(generator={"slots": len(table) - 1}), engine, clock.now)
        generators[name].update(_weights())
        dispatcher.join(name, len(table) - 1, table, 0.0, keeps_bits=True)
    dispatcher.admit(jobs, 0.0)
    left = len(jobs)
    ends = dict.fromkeys(engines, float("inf"))  # when each engine's next sample is done
    on_the_way: list[tuple[float, int, str, SampleJob]] = []  # jobs that are dealt, and when they arrive
    number_of = itertools.count()
    while True:
        began = time.thread_time() - chooser.spent_s
        dealt = dispatcher.turn(clock.time)
        moved = dispatcher.moved(clock.time)
        took_s = time.thread_time() - chooser.spent_s - began
        arrives = clock.time + (took_s if thinking else 0.0)
        for name, given in dealt.items():
            for job in given:
                heapq.heappush(on_the_way, (arrives, next(number_of), name, job))
        touched: set[str] = set()
        for job, source, target in moved:
            touched.add(source)
            mine = [sample_id(*job.key)]
            for handed in generators[source].hand_over(mine):  # none: it is done just now
                moving = replace(job, part=handed.part("bench", source, clock.time))
                heapq.heappush(on_the_way, (arrives, next(number_of), target, moving))
            if generators[source].give_back(mine):
                heapq.heappush(on_the_way, (arrives, next(number_of), target, job))
        if not left:
            return clock.time
        for name in touched:
            generators[name].fill()
            ends[name] = engines[name].next_end()
        due = on_the_way[0][0] if on_the_way else float("inf")
        clock.time = min(max(dispatcher.wakes_at, arrives), due, *ends.values())
        touched.clear()
        while on_the_way and on_the_way[0][0] <= clock.time:
            _, _, name, job = heapq.heappop(on_the_way)
            touched.add(name)
            generators[name].take(job)
            dispatcher.arrived(job.key)
        for name in touched:
            generators[name].fill()
            ends[name] = engines[name].next_end()
        for number, (name, generator) in enumerate(generators.items()):
            if ends[name] > clock.time:
                continue
            for made in generator.step(0.0):
                left -= 1
                key, length = made.begun.job.key, len(made.finished.tokens)
                dispatcher.finished(key, length, clock.time)
                if trace is not None:
                    trace.append(Span(number, made.begun.started_at, clock.time, length))
            generator.fill()
            ends[name] = engines[name].next_end()


def _weights() -> VerifiedWeights:
    """Some weights: a generator does nothing without."""
    return VerifiedWeights(0, "root", _DIGESTS, _PATCH)

"""One iteration in virtual time: real dispatcher and generators, on `ReplayEngine`s that know the lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

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
) -> float:
    """Seconds until the last sample is finished; all are admitted at the start. `trace` is filled."""
    clock = VirtualClock()

    def length_of(request: SampleRequest) -> int:
        return lengths[sample_key(request.id)]

    engines = {
        f"g{number:03d}": ReplayEngine(table, length_of, clock, prefill_s=PREFILL_S)
        for number, table in enumerate(tables)
    }
    dispatcher, generators = Dispatcher(policy), dict[str, Decoding]()
    for (name, engine), table in zip(engines.items(), tables, strict=True):
        generators[name] = Decoding(make_spec(generator={"slots": len(table) - 1}), engine, clock.now)
        generators[name].update(_weights())
        dispatcher.join(name, len(table) - 1, table, 0.0)
    dispatcher.admit(jobs, 0.0)
    left = len(jobs)
    ends = dict.fromkeys(engines, float("inf"))  # when each engine's next sample is done
    while True:
        touched: set[str] = set()
        for name, given in dispatcher.turn(clock.time).items():
            touched.add(name)
            for job in given:
                generators[name].take(job)
        for job, source, target in dispatcher.moved(clock.time):
            touched |= {source, target}
            for handed in generators[source].hand_over([sample_id(*job.key)]):  # none: it is done just now
                generators[target].take(replace(job, part=handed.part("bench", source, clock.time)))
                dispatcher.arrived(job.key)
        if not left:
            return clock.time
        for name in touched:
            generators[name].fill()
            ends[name] = engines[name].next_end()
        clock.time = min(dispatcher.wakes_at, *ends.values())
        for number, (name, generator) in enumerate(generators.items()):
            if ends[name] > clock.time:
                continue
            for made in generator.step(0.0):
                left -= 1
                key, length = made.begun.job.key, len(made.finished.tokens)
                dispatcher.finished(key, length, clock.time)
                if trace is not None:
                    trace.append(Span(number, made.begun.started_at, clock.time, length))
            ends[name] = engines[name].next_end()


def _weights() -> VerifiedWeights:
    """Some weights: a generator does nothing without."""
    return VerifiedWeights(0, "root", _DIGESTS, _PATCH)

"""One iteration in virtual time: real dispatcher, `ReplayEngine`s that know the true lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.policies import Policy
from producers.engines.base import Request
from producers.engines.replay import ReplayEngine, VirtualClock
from producers.jobs import Job, Key
from schemas.identity import sample_id

# A sample that moves is prefilled anew, and nothing else gets on in the meantime: 20,000 tokens a second.
PREFILL_S = 1 / 20_000


@dataclass(frozen=True)
class Span:
    """A sample on its instance."""

    instance: int
    begin: float
    end: float
    length: int


def generate(
    jobs: Sequence[Job],
    lengths: Mapping[Key, int],
    tables: Sequence[np.ndarray],
    policy: Policy,
    trace: list[Span] | None = None,
) -> float:
    """Seconds until the last sample is finished; all are admitted at the start. `trace` is filled."""
    begun: dict[Key, float] = {}
    clock = VirtualClock()
    named = {sample_id(*job.key): job.key for job in jobs}

    def left_of(request: Request) -> int:
        return lengths[named[request.id]] - len(request.prompt)

    engines = {
        f"g{number:03d}": ReplayEngine(
            table,
            left_of,
            clock,
            prefill_s=PREFILL_S,
        )
        for number, table in enumerate(tables)
    }
    so_far: dict[Key, int] = {}  # tokens of samples that moved
    dispatcher = Dispatcher(policy)
    for (name, _), table in zip(engines.items(), tables, strict=True):
        dispatcher.join(name, len(table) - 1, table, 0.0)
    dispatcher.admit(jobs, 0.0)
    left = len(jobs)
    ends = dict.fromkeys(engines, float("inf"))  # when each engine's next sample is done
    while True:
        touched: set[str] = set()
        for name, given in dispatcher.turn(clock.time).items():
            touched.add(name)
            for job in given:
                begun[job.key] = clock.time
                engines[name].submit(Request(sample_id(*job.key), (), 1 << 30, 0, job.prompt.predicted))
        for job, source, target in dispatcher.moved(clock.time):
            name = sample_id(*job.key)
            tokens = engines[source].unfinished()[name]
            so_far[job.key] = so_far.get(job.key, 0) + tokens
            touched |= {source, target}
            engines[source].abort([name])
            engines[target].submit(Request(name, range(so_far[job.key]), 1 << 30, 0, job.prompt.predicted))
            dispatcher.arrived(job.key)
        if not left:
            return clock.time
        for name in touched:
            ends[name] = engines[name].next_end()
        clock.time = min(dispatcher.wakes_at, *ends.values())
        for number, (name, engine) in enumerate(engines.items()):
            if ends[name] > clock.time:
                continue
            for done in engine.step(0.0):
                left -= 1
                key = named[done.id]
                dispatcher.finished(key, lengths[key], clock.time)
                if trace is not None:
                    trace.append(Span(number, begun[key], clock.time, lengths[key]))
            ends[name] = engine.next_end()

"""One iteration in virtual time: real dispatcher, `ReplayEngine`s that know the true lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.policies import Policy
from producers.engines.base import Request
from producers.engines.replay import ReplayEngine, VirtualClock
from producers.jobs import Job, Key
from schemas.identity import sample_id


def generate(
    jobs: Sequence[Job], lengths: Mapping[Key, int], tables: Sequence[np.ndarray], policy: Policy
) -> float:
    """Seconds until the last sample is finished; all are admitted at the start."""
    clock = VirtualClock()
    named = {sample_id(*job.key): job.key for job in jobs}
    engines = {
        f"g{number:03d}": ReplayEngine(table, lambda request: lengths[named[request.id]], clock)
        for number, table in enumerate(tables)
    }
    dispatcher = Dispatcher(policy)
    for (name, _), table in zip(engines.items(), tables, strict=True):
        dispatcher.join(name, len(table) - 1, table, 0.0)
    dispatcher.admit(jobs, 0.0)
    left = len(jobs)
    while True:
        for name, given in dispatcher.turn(clock.time).items():
            for job in given:
                engines[name].submit(Request(sample_id(*job.key), (), 1 << 30, 0, job.prompt.predicted))
        if not left:
            return clock.time
        clock.time = min(engine.next_end() for engine in engines.values())
        for engine in engines.values():
            if engine.next_end() <= clock.time:
                for done in engine.step(0.0):
                    left -= 1
                    dispatcher.finished(named[done.id], len(done.tokens), clock.time)

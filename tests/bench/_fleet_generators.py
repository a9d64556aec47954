"""Many generators in one process.

Each is a whole one, with threads and heartbeat of its own, on a `ReplayEngine` in real time; only the
connections to Kafka are shared. Requests have the lengths of the StreamRL paper's histogram, scaled to the
run's `sampling.max_tokens`; a problem's samples are more alike than those of two problems.
"""

from __future__ import annotations

import argparse
import signal
import threading
from statistics import NormalDist

import numpy as np

from infra.bus import Bus
from infra.logs import set_up
from infra.roles.context import RoleContext, Stopped
from infra.roles.heart import HEARTBEAT_S, Heart
from infra.run_bus import connect
from infra.runs import RunRecord, find
from infra.stores.opening import open_store
from infra.stores.store import Store
from producers.engines.engine import SampleRequest
from producers.engines.without_model import RealClock, ReplayEngine
from producers.generator import Generator
from producers.rewards import RewardOutcome
from schemas.identity import derive_seed
from schemas.topics import Topics
from tests.bench._fleet_bus import SharedBus
from tests.bench._lengths import CURVE, paper_lengths

_ALIKE = 0.9  # of a length's rank, what its problem says: correlation of the normal scores
_TABLE = 1 << 14


class RewardAtOnce:
    """Scores at once."""

    def __init__(self) -> None:
        self._scores: list[RewardOutcome] = []

    def score(self, key: str, problem: str, completion: str) -> None:
        self._scores.append(RewardOutcome(key, {"made": 1.0}))

    def pending(self) -> int:
        return 0

    def poll(self) -> list[RewardOutcome]:
        scores, self._scores = self._scores, []
        return scores

    def close(self) -> None:
        pass


def _table(longest: int) -> np.ndarray:
    return np.sort(paper_lengths(_TABLE, longest, np.random.default_rng(0)))


def mean_length(longest: int) -> float:
    """Mean tokens of a sample."""
    return float(_table(longest).mean())


class PaperLengths:
    """A length for each request, always the same one."""

    def __init__(self, longest: int) -> None:
        self._sorted = _table(longest)

    def __call__(self, request: SampleRequest) -> int:
        normal = NormalDist()
        problem, sample = (
            normal.inv_cdf((derive_seed(*parts) + 1) / (2.0**63 + 1))
            for parts in (request.prompt, [request.seed])
        )
        rank = normal.cdf(_ALIKE * problem + (1 - _ALIKE**2) ** 0.5 * sample)
        return int(self._sorted[min(_TABLE - 1, int(rank * _TABLE))])


def _contexts(
    store: Store, record: RunRecord, bus: Bus, numbers: range, stop: threading.Event
) -> list[RoleContext]:
    log = set_up(record.id, f"generators-{numbers.start}")
    topics = Topics(record.id, record.spec.lengths.classes)
    return [
        RoleContext(
            record, store, bus, topics, log, "generator", number, bus.writer(),
            Heart(record.id, "generator", number), stop,
        )
        for number in numbers
    ]  # fmt: skip


def _generate(context: RoleContext, length_of: PaperLengths) -> None:
    bell = threading.Event()
    engine = ReplayEngine(CURVE.table(context.spec.generator.slots), length_of, RealClock(bell))
    try:
        Generator(context, engine, RewardAtOnce(), lambda tokens: "", bell).open().run()
    except Stopped:
        pass
    except Exception:
        context.log.exception("%s failed", context.name)
        context.stop.set()


def main() -> None:
    """Run them until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    given = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    store = open_store(given.store)
    record = find(store, given.run)
    bus = SharedBus(connect(record, f"generators-{given.first}"))
    contexts = _contexts(store, record, bus, range(given.first, given.first + given.count), stop)
    length_of = PaperLengths(record.spec.sampling.max_tokens)
    threads = [threading.Thread(target=_generate, args=(context, length_of)) for context in contexts]
    for thread in threads:
        thread.start()
    while not stop.wait(HEARTBEAT_S):
        for context in contexts:
            context.heart.beat(context.writer, context.topics)
    for thread in threads:
        thread.join()
    bus.close()


if __name__ == "__main__":
    main()

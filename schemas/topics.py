"""The topics of a run: names, partitions, and how long records are kept."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

FOR_EVER = -1  # as `retention_hours`: records are never removed
SHORT_HOURS = 1  # for records that nobody reads twice
ASSIGNMENT_PARTITIONS = 8  # a generator reads only one of them, and so not everything that others get


@dataclass(frozen=True)
class Topic:
    """A topic's name and the settings that it is created with."""

    name: str
    partitions: int
    compacted: bool = False
    retention_hours: int | None = None  # None: as long as the run file says


def assignment_partition(generator: str) -> int:
    """Return the partition of `<run>.assignments` that a generator reads."""
    return zlib.crc32(generator.encode()) % ASSIGNMENT_PARTITIONS


class Topics:
    """The topics of a run: `<run>.prompts` and so on. `classes`: number of length classes."""

    def __init__(self, run: str, classes: int) -> None:
        self.prompts = Topic(f"{run}.prompts", classes)
        self.samples = Topic(f"{run}.samples", classes)
        self.assignments = Topic(f"{run}.assignments", ASSIGNMENT_PARTITIONS, retention_hours=SHORT_HOURS)
        self.parts = Topic(f"{run}.parts", 1, retention_hours=SHORT_HOURS)
        self.generators = Topic(f"{run}.instances", 1, retention_hours=SHORT_HOURS)
        self.ledger = Topic(f"{run}.ledger", 1, retention_hours=FOR_EVER)
        self.weights = Topic(f"{run}.weights", 1, compacted=True)
        self.ranker = Topic(f"{run}.ranker", 1)
        self.evals = Topic(f"{run}.evals", 1)
        self.dead = Topic(f"{run}.dead", 1)
        self.status = Topic(f"{run}.status", 1, compacted=True)
        self.owner = Topic(f"{run}.owner", 1, compacted=True)
        self.pulse = Topic(f"{run}.pulse", 1, retention_hours=SHORT_HOURS)
        self.balance = Topic(f"{run}.balance", 1, retention_hours=FOR_EVER)

    def all(self) -> list[Topic]:
        """Return every topic, in the order in which they are created."""
        return [
            self.prompts, self.assignments, self.parts, self.generators, self.samples, self.ledger,
            self.weights, self.ranker, self.evals, self.dead, self.status, self.owner, self.pulse,
            self.balance,
        ]  # fmt: skip

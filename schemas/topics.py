"""The topics of a run, and how each is kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """A topic's name and the settings that it is created with."""

    name: str
    partitions: int
    compacted: bool = False


class Topics:
    """Names of a run's topics: `<run>.prompts` and so on."""

    def __init__(self, run: str, classes: int) -> None:
        self.prompts = Topic(f"{run}.prompts", classes)
        self.samples = Topic(f"{run}.samples", classes)
        self.ledger = Topic(f"{run}.ledger", 1)
        self.weights = Topic(f"{run}.weights", 1, compacted=True)
        self.evals = Topic(f"{run}.evals", 1)
        self.dead = Topic(f"{run}.dead", 1)
        self.status = Topic(f"{run}.status", 1, compacted=True)

    def all(self) -> list[Topic]:
        """Every topic, in the order in which they are created."""
        return [
            self.prompts, self.samples, self.ledger, self.weights, self.evals, self.dead, self.status
        ]  # fmt: skip

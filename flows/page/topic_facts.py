"""The facts of a run's topics that its page shows. A file keeps them for the time when the broker is away."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from flows.page.sample_texts import ReadSample
from flows.view.balance_words import balance_row
from flows.view.run_view import RunView

FACTS_FILE = "topics.json"
_MOST_TEXT = 500


@dataclass
class ProcessState:
    """The state of a process, by its last heartbeat."""

    name: str
    host: str
    doing: str
    alive: bool


@dataclass
class TopicFacts:
    """All that the topics of a run say at one moment."""

    at: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)  # the newest steps
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    lengths: list[tuple[float, int]] = field(default_factory=list)  # predicted and true
    edges: list[float] = field(default_factory=list)
    processes: list[ProcessState] = field(default_factory=list)
    balance: list[dict[str, str]] = field(default_factory=list)  # changes of the number of generators
    dead_letters: int = 0
    last_dead: str = ""
    samples: list[ReadSample] = field(default_factory=list)
    samples_missing: str = ""  # why there is no text of samples

    @property
    def alive(self) -> bool:
        """Whether any process was alive."""
        return any(process.alive for process in self.processes)

    def as_json(self) -> dict[str, Any]:
        """Return it for a file."""
        return asdict(self)


def facts_of(view: RunView) -> TopicFacts:
    """Return what a view shows, without the texts of samples."""
    processes = [
        ProcessState(name[:200], process.beat.host[:100], process.doing[:_MOST_TEXT], process.alive)
        for name, process in sorted(view.processes.items())[:200]
    ]
    return TopicFacts(
        at=time.time(), rows=list(view.rows), evaluations=list(view.evaluations),
        lengths=[(said, true) for said, true in view.lengths if math.isfinite(said)],
        edges=[edge for edge in view.edges if math.isfinite(edge)], processes=processes,
        balance=[balance_row(one) for one in view.balance],
        dead_letters=view.dead_letters, last_dead=view.last_dead[:_MOST_TEXT],
    )  # fmt: skip


def facts_from(found: Mapping[str, Any]) -> TopicFacts | None:
    """Return the facts that a file holds; None if it holds none that can be used."""
    try:
        known = {one.name for one in fields(TopicFacts)}
        facts = TopicFacts(**{name: value for name, value in found.items() if name in known})
        facts.processes = [ProcessState(**one) for one in found.get("processes", [])]
        facts.samples = [ReadSample(**one) for one in found.get("samples", [])]
        facts.balance = [{str(name): str(said) for name, said in one.items()} for one in facts.balance]
        facts.lengths = [(float(said), int(true)) for said, true in facts.lengths]
        return facts if float(facts.at) > 0 else None
    except (TypeError, ValueError, AttributeError):
        return None

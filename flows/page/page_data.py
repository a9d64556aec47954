"""All that a page shows, from the report folder and the topics: the folder's lines first, then newer ones."""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flows.page.run_files import SUMMARY_FILE, Row, RunFiles, read_json
from flows.page.topic_facts import TopicFacts
from flows.view.metric_rows import with_rates
from infra.runs import RunRecord
from schemas.runspec import RunSpec

_PACKAGES = (
    "streamrl", "torch", "vllm", "transformers", "tokenizers", "deepspeed", "kafka-python", "prefect",
    "numpy", "numba", "pydantic", "s3fs",
)  # fmt: skip
RUNNING, ENDED, FAILED, INTERRUPTED, UNKNOWN = "running", "ended", "failed", "interrupted", "unknown"


@dataclass(frozen=True)
class SaidState:
    """The state of a run as its flow said it, and why it failed; both are empty if that is not known."""

    state: str = ""
    why: str = ""


@dataclass
class PageData:
    """All that a page shows of a run."""

    record: RunRecord
    files: RunFiles
    facts: TopicFacts | None = None
    said: SaidState = field(default_factory=SaidState)
    missing: list[str] = field(default_factory=list)  # things that could not be had, and why
    old_facts: bool = False  # whether the facts are those of an earlier page
    made_at: float = field(default_factory=time.time)

    @property
    def spec(self) -> RunSpec:
        """The run's settings."""
        return self.record.spec

    @cached_property
    def summary(self) -> Row:
        """The summary of a run that ended; empty if there is none."""
        return read_json(self.files.folder / SUMMARY_FILE)

    @cached_property
    def _newer(self) -> list[Row]:
        """The rows of the topic that the file does not have yet."""
        last = self.files.last
        known = [row for row in (self.facts.rows if self.facts else []) if isinstance(row.get("step"), int)]
        newer = [dict(row) for row in known if last is None or row["step"] > last["step"]]
        if newer:
            with_rates(newer if last is None else [dict(last), *newer])
        return newer

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the steps, thinned; those of the topic follow those of the file."""
        return [*self.files.rows.kept, *self._newer]

    @cached_property
    def last(self) -> Row:
        """The row of the newest step; empty if there is none."""
        newest = self.rows[-1] if self.rows else {}
        return max(newest, self.files.last or {}, key=lambda row: row.get("step", -1))

    @cached_property
    def keys(self) -> list[str]:
        """The names of all metrics."""
        return list(self.files.keys) or list(self.last)

    @cached_property
    def totals(self) -> dict[str, Any]:
        """Sums over the steps. Without a file they are of the newest steps alone."""
        sums = copy.copy(self.files.totals)
        for row in self._newer:
            sums.add(row)
        return sums.summary()

    @cached_property
    def evaluations(self) -> list[Row]:
        """The rows of the evaluations, one for each version."""
        sources: Sequence[Sequence[Row]] = (
            _rows_in(self.summary.get("evaluations")),
            self.files.evaluations.kept,
            self.facts.evaluations if self.facts else [],
        )
        found = {
            row["version"]: row for rows in sources for row in rows if isinstance(row.get("version"), int)
        }
        return [found[number] for number in sorted(found)]

    @cached_property
    def state(self) -> str:
        """The state of the run, as a word."""
        if self.said.state:
            return self.said.state
        if self.facts is not None and self.facts.alive and not self.old_facts:
            return RUNNING
        return ENDED if self.summary else UNKNOWN


def _rows_in(found: object) -> list[Row]:
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


@cache
def versions_here() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, of this environment."""
    found = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

"""What is asked for when a run is started, and what is given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import Explained


class RunFailed(Explained):
    """A run that ended before it was done: what happened, where the log is, how to go on."""


class RunCancelled(RunFailed):
    """A run that somebody cancelled."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run to start, or with `resume` to go on with: True is the newest run of the run file's name."""

    runfile: str
    overrides: Sequence[str] = ()
    resume: str | bool | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that is done."""

    run: str
    report: Path
    summary: dict[str, Any]

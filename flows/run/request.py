"""The request to start a run, its result, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import Explained


class RunFailed(Explained):
    """A run ended before it was done. The message says what happened, where the log is, how to go on."""


class LastingFailure(RunFailed):
    """A run ended by an error that it would meet again, until somebody changes something."""

    lasting = True


class RunCancelled(RunFailed):
    """Somebody cancelled the run."""


class RunSuspended(BaseException):
    """A paused run leaves this process, and its host starts it again later. Not an error."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run to start or, with `resume`, to go on with: an id, or True for the newest run of that run file."""

    runfile: str
    overrides: Sequence[str] = ()
    resume: str | bool | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run that is done."""

    run: str
    report: Path
    summary: dict[str, Any]

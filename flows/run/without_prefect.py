"""Runs a run file with no Prefect at all: each phase is a plain call."""

from __future__ import annotations

from collections.abc import Sequence

from flows.run.phases import conduct
from flows.run.request import RunRequest, RunResult
from flows.view.screen import Nobody, Screen


def train_plainly(
    runfile: str,
    overrides: Sequence[str] = (),
    resume: str | bool | None = None,
    *,
    screen: Screen | None = None,
) -> RunResult:
    """Run a run file to its end, as the flow `train` does, without Prefect."""
    return conduct(RunRequest(runfile, tuple(overrides), resume), screen or Nobody())

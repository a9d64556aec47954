"""Computes the rewards of a step's samples again, by the task's own code, and compares them.

Rewards run as in production: in processes that can be killed, each with a deadline, without credentials.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.run.request import RunFailed
from infra.contents import content
from infra.runs import RunRecord
from producers.regenerating import RedrawProgress
from producers.rewards import RewardOutcome, RewardPool
from producers.stopping import stopping_of
from schemas.messages import Sample

_POLL_S = 0.01


@dataclass(frozen=True)
class Rescored:
    """A sample, and the reward that it has now."""

    sample: Sample
    outcome: RewardOutcome

    @property
    def equal(self) -> bool:
        """Whether all parts are the same, or there is none for the same reason."""
        said, now = self.sample, self.outcome
        if said.reward_error or now.error:
            return said.reward_error == now.error
        return said.reward_parts == now.parts and said.reward == now.total

    @property
    def apart(self) -> float:
        """The difference of the reward; NaN if there is one now or was one then, but not both."""
        if self.sample.reward_error or self.outcome.error:
            return 0.0 if self.sample.reward_error and self.outcome.error else math.nan
        return abs(self.sample.reward - self.outcome.total)


@dataclass(frozen=True)
class RewardCode:
    """The code that computes a task's rewards."""

    where: str  # the file or module that the run's record names
    changed: bool | None  # since the run began; None: nobody can tell


def reward_code(record: RunRecord) -> RewardCode:
    """Return the code of a run's reward. Raises RunFailed if its file is not on this machine."""
    task = record.spec.task
    setting, where = ("task.reward", task.reward) if task.reward else ("task.python", task.python)
    assert where is not None, "a task without a reward has no run"
    source = where.rpartition(":")[0] if ":" in where else where
    if source.endswith(".py") and not Path(source).is_file():
        raise RunFailed(
            f"the reward of run {record.id} is not on this machine: there is no file {source}. Put it there; "
            "without it, `streamrl replay` takes rewards as they are recorded"
        )
    then, now = record.contents.get(setting), content(where)
    return RewardCode(where, None if not then or not now else then != now)


def rescored(
    record: RunRecord, samples: Sequence[Sample], problems: Mapping[int, str],
    progress: RedrawProgress = lambda done, total: None,
) -> list[Rescored]:  # fmt: skip
    """Return the rewards that samples have now. `problems`: as JSON, by group."""
    text = stopping_of(record.model, record.spec).text
    found: dict[str, RewardOutcome] = {}
    pool = RewardPool(record.spec.task)
    try:
        for one in samples:
            pool.score(one.id, _one_line(problems[one.group], one.id), text(one.tokens))
        while len(found) < len(samples):
            came = pool.poll()
            found |= {one.key: one for one in came}
            progress(len(found), len(samples))
            if not came:
                time.sleep(_POLL_S)
    finally:
        pool.close()
    return [Rescored(one, found[one.id]) for one in samples]


def _one_line(problem: str, sample: str) -> str:
    """Return a problem as one line of JSON, as a reward process takes it: a stranger may have written it."""
    try:
        said = json.loads(problem)
    except (ValueError, RecursionError) as error:
        raise RunFailed(f"the problem of sample {sample} is no JSON: {str(error)[:200]}") from error
    if not isinstance(said, dict):
        raise RunFailed(f"the problem of sample {sample} is no JSON object")
    return json.dumps(said)

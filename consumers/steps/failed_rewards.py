"""Samples without a reward: an example for each step's record, and the end of a run that has too many."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.errors import Explained
from schemas.messages import Sample, StepRecord
from schemas.shortening import printable

_WATCHED = 2  # newest iterations whose samples are counted together
_LONGEST = 500  # characters of a reason


class RewardsFail(Explained):
    """Too many samples of the last iterations have no reward; the message has a reason and an example."""

    lasting = True


def example_of(samples: Sequence[Sample]) -> tuple[str, str]:
    """Return the most frequent reason why samples have no reward, and the id of the first such sample.

    Both are empty if all samples have one.
    """
    reasons = Counter(sample.reward_error for sample in samples if sample.reward_error)
    if not reasons:
        return "", ""
    most = max(reasons.values())
    reason = min(one for one, count in reasons.items() if count == most)  # not the first that came
    return printable(reason, _LONGEST), min(sample.id for sample in samples if sample.reward_error == reason)


@dataclass
class _Iteration:
    number: int
    samples: int = 0
    failed: int = 0


class FailedRewards:
    """Counts the samples without a reward of the last two iterations."""

    def __init__(self, run: str, allowed: float) -> None:
        """`allowed`: the share of samples that may lack a reward (task.max_failed_rewards)."""
        self._run, self._allowed = run, allowed
        self._newest: deque[_Iteration] = deque(maxlen=_WATCHED)
        self._example: StepRecord | None = None

    def took(self, record: StepRecord) -> None:
        """Count a step. Raises RewardsFail behind an iteration with which there are too many."""
        if not self._newest or self._newest[-1].number != record.iteration:
            self._newest.append(_Iteration(record.iteration))
        newest = self._newest[-1]
        newest.samples += int(record.rewards.size)
        newest.failed += int(np.isnan(record.rewards).sum())
        if record.failed_reason:
            self._example = record
        if record.last_of_iteration and len(self._newest) == _WATCHED:
            self._judge()

    def _judge(self) -> None:
        samples, failed = (
            sum(one.samples for one in self._newest), sum(one.failed for one in self._newest)
        )  # fmt: skip
        if failed <= self._allowed * samples or self._example is None:
            return
        found, first, last = self._example, self._newest[0].number, self._newest[-1].number
        raise RewardsFail(
            f"{failed} of the {samples} samples of iterations {first} and {last} have no reward; more than "
            f"{self._allowed:.0%} end a run (task.max_failed_rewards). The most frequent reason is: "
            f"{found.failed_reason}. An example is sample {found.failed_sample}, which this shows: streamrl "
            f"samples {self._run} --step {found.step} --where id={found.failed_sample}. Mend the reward and "
            "start a new run; to go on with this one as it is, resume it with --set task.max_failed_rewards=1"
        )

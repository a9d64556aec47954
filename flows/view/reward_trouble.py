"""Says what is wrong with the rewards of a run: samples that have none, and iterations without a gradient.

steps of the ledger ──┐
heartbeats ───────────┴──► sentences: in the live view at once, said once for each new reason, and kept in
                           `told.jsonl` for the summary
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flows.view.line_files import LinesFile, lines_of
from schemas.messages import Heartbeat, StepRecord
from schemas.shortening import printable

TOLD_FILE = "told.jsonl"
_SAID_AFTER = 2  # iterations without a gradient in a row: one alone happens
_MOST = 50  # reasons that a process says; a reward may name the sample in each of them
_STALE_S = 90.0  # a generator that is silent for so long is not shown
_SHOWN = 10  # sentences in a summary
_LONGEST = 600  # characters of a reason


@dataclass(frozen=True, slots=True)
class RewardSentence:
    """A sentence for people. Sentences with the same key say the same thing again."""

    key: str
    text: str


class RewardTrouble:
    """The trouble with rewards as the newest steps and heartbeats show it."""

    def __init__(self) -> None:
        self.without_gradient = 0  # newest iterations in a row
        self.failed = 0  # samples of the newest step that have no reward
        self._any_gradient = False  # in the iteration that goes on
        self._rewards: tuple[float, float] | None = None  # least and greatest since there was a gradient
        self._step: RewardSentence | None = None
        self._generators: dict[str, tuple[float, RewardSentence]] = {}  # each with the time of its heartbeat

    def take_step(self, record: StepRecord) -> None:
        """Take the next step of the ledger."""
        rewards = record.rewards[~np.isnan(record.rewards)]
        self.failed = int(record.rewards.size - rewards.size)
        self._step = self._of_step(record) if self.failed else None
        self._any_gradient |= not record.metrics.get("skipped", 0.0)
        if rewards.size:
            low, high = self._rewards or (np.inf, -np.inf)
            self._rewards = min(low, float(rewards.min())), max(high, float(rewards.max()))
        if record.last_of_iteration:
            self.without_gradient = 0 if self._any_gradient else self.without_gradient + 1
            if self._any_gradient:
                self._rewards = None
            self._any_gradient = False

    def take_beat(self, beat: Heartbeat) -> None:
        """Take a heartbeat: a generator says why a sample has no reward, long before the step is taken."""
        name = f"{beat.role}-{beat.number}"
        if beat.trouble and not beat.is_last:
            text = printable(beat.trouble, _LONGEST)
            self._generators.pop(name, None)
            self._generators[name] = time.monotonic(), RewardSentence(_key(text), f"{name}: {text}")
            if len(self._generators) > _MOST:
                del self._generators[next(iter(self._generators))]
        else:
            self._generators.pop(name, None)

    def sentences(self) -> list[RewardSentence]:
        """Return a sentence for each thing that is wrong now, those that differ in their numbers once."""
        since = time.monotonic() - _STALE_S
        found = {one.key: one for heard, one in self._generators.values() if heard > since}
        if self._step is not None:
            found[self._step.key] = self._step
        if self.without_gradient:
            found["no gradient"] = RewardSentence("no gradient", self._no_gradient())
        return list(found.values())[:_SHOWN]

    def _of_step(self, record: StepRecord) -> RewardSentence:
        reason = printable(record.failed_reason, _LONGEST) or "the reason is in the generators' logs"
        share = f"{self.failed} of the {record.rewards.size} samples of iteration {record.iteration}"
        example = f" (as of sample {printable(record.failed_sample, 100)})" if record.failed_sample else ""
        return RewardSentence(_key(reason), f"{share} have no reward: {reason}{example}")

    def _no_gradient(self) -> str:
        count = self.without_gradient
        since = "the last iteration" if count == 1 else f"the last {count} iterations"
        low, high = self._rewards or (0.0, 1.0)
        alike = f" (every reward is {low:g})" if low == high else ""
        return (
            f"no group of {since} has rewards that differ{alike}: there is no gradient, and the weights stay "
            "as they are. The reward may be constant, or the task too hard or too easy for the model"
        )


def _key(reason: str) -> str:
    """Return what is left of a reason without its numbers and quoted values, which differ by sample."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "#", reason)[:200]


class RewardSayings:
    """Says each new thing that is wrong with the rewards once, and keeps it for the summary."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._file, self._say = LinesFile(folder / TOLD_FILE), say
        self._said: set[str] = set()

    def see(self, trouble: RewardTrouble) -> None:
        """Say what is new."""
        if not trouble.without_gradient:
            self._said.discard("no gradient")  # if it comes again, that is news
        for one in trouble.sentences():
            early = one.key == "no gradient" and trouble.without_gradient < _SAID_AFTER
            if one.key in self._said or early or len(self._said) >= _MOST:
                continue
            self._said.add(one.key)
            self._say(one.text)
            try:
                self._file.append(json.dumps({"at": time.time(), "said": one.text}))
            except OSError as error:
                self._say(f"{self._file.path} can't be written, and the summary lacks this: {error}")


def told(folder: Path) -> list[str]:
    """Return the newest sentences that were said of a run's rewards, each once."""
    said = dict.fromkeys(str(row.get("said", "")) for row in lines_of(folder / TOLD_FILE))
    return list(said)[-_SHOWN:]

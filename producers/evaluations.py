"""Evaluations: measures the rewards of versions on held-out problems, beside training.

    a version ──► its prompts ──► generators ──► fit samples ──► whole? ──► <run>.evals
                                                  waits for: samples / unblocked by the generators

Several evaluations may be open at a time. A sample that is not fit becomes a dead letter and is made again.
If it is unfit three times it counts as failed, so that a measurement never ends a run.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from infra.bus import Record
from infra.roles.context import RoleContext
from producers.dispatch.jobs import RecordPlace
from producers.sample_feed import AdmittedSample, SampleFeed
from producers.snapshots import Opened, OpenEvaluation, Positions
from schemas.identity import SampleKey, sample_id
from schemas.messages import EVAL, Evaluation, Prompt
from schemas.wire import encode

_TIMES = 3  # how often a sample may be unfit before it counts as failed


@dataclass(frozen=True, slots=True)
class _Answer:
    """The fields of a sample that its evaluation keeps."""

    problem_id: str
    reward: float
    length: int
    predicted: float
    newest: int


@dataclass(frozen=True, slots=True)
class _Came:
    """A sample of an evaluation. If the sample is not fit, `fault` says why and `record` is its record."""

    version: int
    key: SampleKey
    answer: _Answer
    record: Record | None = None
    fault: str = ""


@dataclass
class _Open:
    """An evaluation that still waits for samples."""

    prompts: Sequence[Prompt]
    opened: Opened
    samples: Positions
    found: dict[SampleKey, _Answer] = field(default_factory=dict)
    unfit: dict[SampleKey, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wanted = {(prompt.group, index) for prompt in self.prompts for index in range(prompt.size)}


class Evaluations:
    """Collects the samples of open evaluations, and publishes each evaluation that is complete."""

    def __init__(
        self, context: RoleContext, feed: SampleFeed, *, done: Iterable[int],
        letters: Collection[RecordPlace], position: int, fence: Callable[[], None],
    ) -> None:  # fmt: skip
        """`done`: versions that are evaluated, as found on `<run>.evals` before `position`.

        `letters`: places of samples that are dead letters already. `fence` raises if a newer feeder has
        replaced this one.
        """
        self._context, self._feed, self._fence = context, feed, fence
        self._letters = frozenset(letters)
        self.open: dict[int, _Open] = {}
        self.done, self.position = set(done), position
        self._came = threading.Event()
        self._samples = feed.subscribe(self._wanted, self._came)

    def connect(self) -> Evaluations:
        """Open the topic of evaluations. Return itself."""
        self._evals = self._context.bus.reader(self._context.topics.evals)
        return self

    def wants(self, version: int) -> bool:
        """Whether a version is to be evaluated and its evaluation has not begun."""
        return self._context.spec.evaluates(version) and version not in self.done and version not in self.open

    def begin(self, version: int, prompts: Sequence[Prompt], opened: Opened, samples: Positions) -> None:
        """Open the evaluation of a version.

        `opened` and `samples`: where prompts, dead letters and samples ended before anything was sent.
        """
        self.open[version] = _Open(prompts, opened, samples)
        self._feed.admitted(prompts)

    def state(self) -> list[OpenEvaluation]:
        """Return the open evaluations, for the feeder's snapshot."""
        return [
            OpenEvaluation(version=version, opened=one.opened, samples=one.samples)
            for version, one in self.open.items()
        ]

    def forget(self, version: int) -> None:
        """Forget that versions before this one are evaluated: nobody asks for them again."""
        self.done = {one for one in self.done if one >= version}

    def collect(self, wait_s: float = 0.0) -> bool:
        """Take the samples that have come, or that come within `wait_s` seconds. Return whether any did."""
        if wait_s:
            self._came.wait(wait_s)
        self._came.clear()
        came = self._samples.take()
        for one in came:
            self._take(one)
        for version in [version for version, one in self.open.items() if len(one.found) == len(one.wanted)]:
            self._write(version)
        return bool(came)

    def missing(self) -> int:
        """Return how many samples the open evaluations still wait for."""
        return sum(len(one.wanted) - len(one.found) for one in self.open.values())

    def close(self) -> None:
        """Close the reader."""
        self._evals.close()

    def _wanted(self, taken: AdmittedSample) -> _Came | None:
        """Pick an evaluation's sample. Called in the feed's thread."""
        sample = taken.sample
        if taken.prompt.purpose != EVAL:
            return None
        version = taken.prompt.iteration
        if taken.fault:
            failed = _Answer(taken.prompt.problem_id, math.nan, 0, taken.prompt.predicted, -1)
            return _Came(version, taken.key, failed, taken.record, taken.fault)
        reward = math.nan if sample.reward_error else sample.reward
        answer = _Answer(
            sample.problem_id, reward, sample.true_length, sample.predicted, int(sample.versions[-1])
        )
        return _Came(version, taken.key, answer)

    def _take(self, came: _Came) -> None:
        one = self.open.get(came.version)
        if one is None or came.key not in one.wanted or came.key in one.found:
            return
        if came.record is None:
            one.found[came.key] = came.answer
            return
        times = one.unfit[came.key] = one.unfit.get(came.key, 0) + 1
        again = times < _TIMES
        if (came.record.partition, came.record.offset) not in self._letters:
            wanted = sample_id(*came.key) if again else ""
            self._context.dead_letter(came.record, came.fault, wanted=wanted)
        if not again:
            one.found[came.key] = came.answer

    def _write(self, version: int) -> None:
        one = self.open[version]
        answers = [one.found[key] for key in sorted(one.found, reverse=True)]
        rewards = np.array([answer.reward for answer in answers], dtype=np.float32)
        failed = int(np.isnan(rewards).sum())
        evaluation = Evaluation(
            run=self._context.run, version=version, problem_ids=[answer.problem_id for answer in answers],
            rewards=rewards, lengths=np.array([answer.length for answer in answers], dtype=np.int32),
            predicted=np.array([answer.predicted for answer in answers], dtype=np.float32),
            failed=failed, finished_at=time.time(), newest=max(answer.newest for answer in answers),
        )  # fmt: skip
        self._fence()
        self._context.writer.send(self._context.topics.evals, encode(evaluation), key=str(version))
        self._context.writer.flush(self._context.spec.deadlines.progress_s)
        self.position = self._evals.end_offsets()[0]
        del self.open[version]
        self.done.add(version)
        self._feed.evaluated(prompt.group for prompt in one.prompts)
        self._context.log.info(
            "version %d earns %.3f on %d held-out samples, %d without a reward", version,
            float(np.nanmean(rewards)) if failed < len(answers) else math.nan, len(answers), failed,
        )  # fmt: skip

"""The other end of the process of a learner that is profiled."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from consumers.learner_process import (
    CallsReport,
    LearnerFailed,
    LearnerOptions,
    LearnerOrder,
    LearnerReady,
    LearnerReport,
    PutReport,
    PutVersion,
    SecondsReport,
    StepReport,
    TakeSamples,
    TakeSnapshot,
    TakeStep,
    TrainBundles,
)
from consumers.timed_training import CallTable, StepSeconds, VersionPut
from infra.errors import Explained
from infra.supervise.quiet_child import ChildEnded, QuietChild

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LearnerReport).decode
_Report = TypeVar("_Report", LearnerReady, SecondsReport, CallsReport, StepReport, PutReport)


class ProfilingFailed(Explained):
    """A part of a run can't be measured; the message says which and why."""


class ProfiledLearner:
    """A learner, with all its ranks, in a process of its own."""

    def __init__(self, options: LearnerOptions, env: Mapping[str, str], *, deadline_s: float) -> None:
        """`env`: variables that the trainer of the run has. `deadline_s`: for each order."""
        self._options, self._env, self._deadline = options, dict(env), deadline_s
        self.start_s, self.root = 0.0, ""

    def open(self) -> ProfiledLearner:
        """Start the process; `wait_until_ready` waits for the learner. Return itself."""
        self._began = time.time()
        self._child = QuietChild("consumers.learner_process", self._options, self._env).open()
        return self

    def wait_until_ready(self) -> None:
        """Wait until the learner is loaded. Raises ProfilingFailed if it can't be."""
        ready = self._take(LearnerReady)
        self.root = ready.root
        self.start_s = max(1e-3, ready.ready_at - self._began)

    def take(self, records: Sequence[bytes]) -> float:
        """Give samples to train. Return the seconds of reading one."""
        self._send(TakeSamples(records=list(records)))
        return self._take(SecondsReport).seconds

    def begin_training(self, bundles: Sequence[Sequence[int]], most_s: float = 0.0) -> None:
        """Begin to train bundles of the samples' numbers; `trained` waits for the end."""
        self._send(TrainBundles(bundles=[list(one) for one in bundles], most_s=most_s))

    def trained(self) -> CallTable:
        """Return the calls of what was begun."""
        return self._take(CallsReport).table

    def step(self) -> StepSeconds:
        """Have an optimizer step taken."""
        self._send(TakeStep())
        return self._take(StepReport).took

    def put(self, version: int) -> VersionPut:
        """Have the weights put into the store."""
        self._send(PutVersion(version=version))
        return self._take(PutReport).put

    def snapshot(self) -> float:
        """Return the seconds for which a checkpoint holds training up."""
        self._send(TakeSnapshot())
        return self._take(SecondsReport).seconds

    def close(self) -> None:
        """End the process, and those of its ranks with it."""
        self._child.close()

    def _send(self, order: LearnerOrder) -> None:
        self._child.send(_encode(order))

    def _take(self, kind: type[_Report]) -> _Report:
        try:
            data = self._child.receive(self._deadline)
        except ChildEnded as ended:
            raise ProfilingFailed(f"the learner's process {ended}") from None
        if data is None:
            raise ProfilingFailed(f"the learner took more than {self._deadline:.0f} s (deadlines.progress_s)")
        report = _decode(data)
        if isinstance(report, LearnerFailed):
            failed = ProfilingFailed(f"the learner can't be measured: {report.reason}")
            failed.lasting = report.lasting
            raise failed
        assert isinstance(report, kind), report
        return report

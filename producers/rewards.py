"""Computes rewards in processes that can be killed, each with a deadline, and without our credentials.

score() ──► queue ──► worker: several jobs in its pipe, answered in order ──► poll()
                         │  late, dead or unreadable: the job it was at fails, a new
                         └─ worker gets the rest
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from infra.code import module
from infra.credentials import without_credentials
from infra.supervise.argument_file import argument_file
from infra.supervise.children import kill, start_child, used_s
from producers.tasks import TaskError
from schemas.runspec import TaskSection

# Jobs are sent to a worker ahead, so that it does not wait for us: twice as many as it did between two polls.
# So fast rewards are there at the next poll, and slow ones are still shared evenly.
_LEAST_AHEAD, _MOST_AHEAD = 16, 1024
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """A reward, or the reason why there is none."""

    key: str
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def total(self) -> float:
        """The sum of the parts; NaN without a reward."""
        return float("nan") if self.error else sum(self.parts.values())


class _Worker:
    def __init__(self, task: TaskSection) -> None:
        self._task = task
        self.ready = False
        self.jobs: deque[tuple[str, str]] = deque()
        self.ahead = _LEAST_AHEAD
        self.since = time.monotonic()  # when the present job began
        self._partial, self._unsent = b"", b""

    def open(self) -> _Worker:
        """Start the process. Return itself."""
        with argument_file(self._task.model_dump_json().encode()) as said:
            self.process = start_child(
                [sys.executable, "-m", module("producers.reward_worker"), str(said)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=without_credentials(), pass_fds=[said],
            )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.jobs_pipe, self.answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.jobs_pipe, False)
        os.set_blocking(self.answers, False)
        return self

    def send(self, jobs: list[tuple[str, str]]) -> None:
        if not self.jobs:
            self.since = time.monotonic()
        self.jobs.extend(jobs)
        self._unsent += "".join(line for _, line in jobs).encode()

    def push(self) -> None:
        """Write what the pipe takes, without waiting: a worker that hangs must not hold up the others."""
        if not self._unsent:
            return
        try:
            self._unsent = self._unsent[os.write(self.jobs_pipe, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent = b""  # its answers will end: that shows that it died

    def lines(self) -> tuple[list[bytes], bool]:
        """Return the complete answers that have come, and whether the worker is gone."""
        try:
            data = os.read(self.answers, 1 << 16)
        except BlockingIOError:
            return [], False
        *whole, self._partial = (self._partial + data).split(b"\n")
        return whole, not data


class RewardPool:
    """Scores completions. For use by one thread."""

    def __init__(self, task: TaskSection) -> None:
        self._task = task
        self._waiting: deque[tuple[str, str]] = deque()
        self._workers = [_Worker(task).open() for _ in range(task.reward_workers)]
        self.restarts = 0

    def score(self, key: str, problem: str, completion: str) -> None:
        """Queue a completion; the next poll sends it to a worker. `problem` is JSON."""
        problem = problem.replace("\n", " ")  # a line is one job: two would get two answers
        self._waiting.append((key, f'{{"problem":{problem},"completion":{json.dumps(completion)}}}\n'))

    def pending(self) -> int:
        """Return how many completions have no score yet."""
        return len(self._waiting) + sum(len(worker.jobs) for worker in self._workers)

    def cpu_s(self) -> float:
        """Return the processor seconds of the workers that are there."""
        return sum(used_s(worker.process) for worker in self._workers)

    def poll(self) -> list[RewardOutcome]:
        """Return the scores that have come since the last call. Replace workers that are late.

        Raises TaskError if a worker can't start.
        """
        scores: list[RewardOutcome] = []
        for number, worker in enumerate(self._workers):
            lines, gone = worker.lines()
            for line in lines:
                self._take(worker, json.loads(line), scores)
            if lines:
                worker.ahead = min(max(2 * len(lines), _LEAST_AHEAD), _MOST_AHEAD)
            limit = self._task.reward_deadline_s if worker.ready else _START_S
            late = (worker.jobs or not worker.ready) and time.monotonic() - worker.since > limit
            if gone or late:
                setting = " (task.reward_deadline_s)" if worker.ready else ""
                why = f"no answer within {limit:g} s{setting}" if late else _ended(worker)
                self._replace(number, why, scores, late=bool(late))
        self._hand_out()
        return scores

    def _take(self, worker: _Worker, answer: dict[str, Any], scores: list[RewardOutcome]) -> None:
        if not worker.ready:
            if "error" in answer:
                raise TaskError(answer["error"])
            worker.ready = True
        else:
            key, _ = worker.jobs.popleft()
            scores.append(RewardOutcome(key, answer.get("parts", {}), answer.get("error", "")))
        worker.since = time.monotonic()

    def _replace(self, number: int, reason: str, scores: list[RewardOutcome], *, late: bool) -> None:
        worker = self._workers[number]
        kill(worker.process)
        if not worker.ready:
            failed = TaskError(
                f"the reward process did not start: {reason}; its output is in the generator's log"
            )
            failed.lasting = not late  # the machine may have been busy
            raise failed
        if worker.jobs:
            key, _ = worker.jobs.popleft()
            scores.append(RewardOutcome(key, error=reason))
        self._waiting.extendleft(reversed(worker.jobs))
        self._workers[number] = _Worker(self._task).open()
        self.restarts += 1

    def _hand_out(self) -> None:
        """Send queued jobs to the workers with the fewest jobs, in one write for each."""
        shares: dict[int, list[tuple[str, str]]] = {}
        while self._waiting:
            loads = [len(w.jobs) + len(shares.get(n, ())) for n, w in enumerate(self._workers)]
            number = loads.index(min(loads))
            if loads[number] >= self._workers[number].ahead:
                break
            shares.setdefault(number, []).append(self._waiting.popleft())
        for number, jobs in shares.items():
            self._workers[number].send(jobs)
        for worker in self._workers:
            worker.push()

    def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            kill(worker.process)


def _ended(worker: _Worker) -> str:
    """Say how a worker's process ended: a reward may call exit, crash, or need more memory than there is."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = worker.process.wait(0.1)
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"
    return "its process closed its output"

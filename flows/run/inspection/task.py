"""Inspects the user's task in a process of its own: a task may hang, exit, fork, fill memory or print.

look ──► producers.task_probe ── pipe ──► what it does now, what it found
             │ a deadline for each thing that it does, a limit on its memory, no credentials
             ▼
         killed, with all that it has started
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from flows.run.inspection.finding import Finding
from infra.code import module
from infra.credentials import without_credentials
from infra.hub import advice, cached, is_offline
from infra.machine_memory import whole_memory
from infra.supervise.argument_file import argument_file
from infra.supervise.children import kill, start_child
from infra.supervise.lifeline import carrying
from infra.supervise.team import worker_environment
from producers.task_probe import ProbeRequest
from schemas.runspec import RunSpec
from schemas.shortening import printable, shown

FIRST = 32  # problems that are read of each split
LONGEST_S = 60.0  # for an import, and for reading the first problems
MOST_MEMORY = min(8 << 30, whole_memory() // 2)  # bytes of the process and its children
_LONG_S = 5.0  # what takes longer is said before a start
_MOST_ANSWERS = 1 << 20  # bytes
_MARK = "STREAMRL_PROBE"
_START = "the start of its process"


def look_at_task(
    spec: RunSpec, model: Path | None, say: Callable[[str], None] | None = None, *,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Finding]:  # fmt: skip
    """Return the findings about the task. `model`: the folder with the tokenizer; None if it is not there.

    `meanwhile` is called once the task's process is started.

    `say`: a run is about to start. Then the task gets as long as deadlines.start_s allows, and if it takes
    more memory than a look may, that is no fault.
    """
    task = spec.task
    if task.dataset and not Path(task.dataset).exists() and cached(task.dataset, "dataset") is None:
        if is_offline():
            said = advice(task.dataset, "dataset", "HF_HUB_OFFLINE is set")
            return [Finding("task", f"task.dataset: {said}", wrong=True)]
        return [Finding("task", f"the dataset {task.dataset} is not on this machine; a run fetches it")]
    held_out = [task.held_out_split] if spec.evaluation.problems else []
    job = ProbeRequest(
        task=task, splits=[task.train_split, *held_out], first=min(FIRST, task.limit),
        tokenizer=None if model is None else str(model), longest=spec.sampling.max_prompt_tokens,
    )  # fmt: skip
    with _Probe(job, spec, say) as probe:
        meanwhile()
        return list(probe.findings())


class _Probe:
    """The process that imports the task: it is started, its answers are read, and it is killed."""

    def __init__(self, job: ProbeRequest, spec: RunSpec, say: Callable[[str], None] | None) -> None:
        self._job, self._spec, self._say = job, spec, say
        self._told = ""  # the thing of which was said that it takes long
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._doing, self._since = _START, time.monotonic()
        self._output, self._rest, self._size = b"", b"", 0
        self._open: set[int] = set()  # our ends of pipes that the process has not closed

    def __enter__(self) -> _Probe:
        self._answers, theirs = os.pipe()
        name, _, value = self._mark.partition("=")
        offline = "1" if self._job.task.dataset else os.environ.get("HF_HUB_OFFLINE", "1")  # as in a run
        environment = without_credentials(worker_environment()) | {name: value, "HF_HUB_OFFLINE": offline}
        try:
            with argument_file(self._job.model_dump_json().encode()) as said:
                self._process = start_child(
                    [sys.executable, "-m", module("producers.task_probe"), str(said), str(theirs)],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    env=environment, pass_fds=[said, theirs],
                )  # fmt: skip
        finally:
            os.close(theirs)
        assert self._process.stdout is not None
        self._open = {self._answers, self._process.stdout.fileno()}
        return self

    def __exit__(self, *_: object) -> None:
        kill(self._process)
        for pid in carrying(self._mark):  # processes that left the group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        os.close(self._answers)

    def findings(self) -> Iterator[Finding]:
        """Yield findings as they come. The last one says why, if the process did not come to its end."""
        while True:
            for line in self._lines():
                answer = self._understood(line)
                if answer is None or self._size > _MOST_ANSWERS:
                    yield self._wrong("it writes to descriptors that it did not open, or prints without end")
                    return
                if answer.get("pid") != self._process.pid:
                    continue  # the task has forked
                if answer.get("done"):
                    return
                if "doing" in answer:
                    self._doing, self._since = str(answer["doing"]), time.monotonic()
                else:
                    wrong, noted = bool(answer["wrong"]), bool(answer.get("noted"))
                    yield Finding(str(answer["thing"]), str(answer["said"]), wrong=wrong, noted=noted)
            if self._say is not None:
                self._tell(self._say)
                if (memory := self._memory()) > MOST_MEMORY:
                    yield Finding("task", f"{self._doing}: {_much(memory)}; the run tries it", noted=True)
                    return
            if trouble := self._trouble():
                yield self._wrong(trouble)
                return

    def _lines(self) -> list[bytes]:
        """Return whole lines of answers that come within 0.1 s. Keeps the last 4 KB of the other output."""
        if not self._open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
        ready, _, _ = select.select(self._open, [], [], 0.1)
        for descriptor in ready:
            data = os.read(descriptor, 1 << 16)
            if not data:
                self._open.discard(descriptor)
            elif descriptor == self._answers:
                self._size += len(data)
                self._rest += data
            else:
                self._output = (self._output + data)[-4096:]
        *whole, self._rest = self._rest.split(b"\n")
        return whole

    def _understood(self, line: bytes) -> dict[str, Any] | None:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) and ("pid" in answer) else None

    def _trouble(self) -> str:
        """Return why the process will not come to its end; empty if it may."""
        if time.monotonic() - self._since > self._limit:
            setting = (
                "task.reward_deadline_s" if self._scores else f"deadlines.start_s, {LONGEST_S:g} at most"
            )
            if self._say is not None and not self._scores:
                setting = "deadlines.start_s"
            return f"it takes longer than {self._limit:g} s ({setting})"
        if self._size > _MOST_ANSWERS or len(self._rest) > _MOST_ANSWERS:
            return "it writes to descriptors that it did not open"
        if (memory := self._memory()) > MOST_MEMORY:
            return _much(memory)
        code = self._process.poll()
        if code is None or (self._answers in self._open and select.select([self._answers], [], [], 0)[0]):
            return ""  # it is alive, or has left something to read
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the process {how}"

    @property
    def _scores(self) -> bool:
        return self._doing.startswith("the reward")

    @property
    def _limit(self) -> float:
        if self._doing == _START:
            return LONGEST_S
        if self._scores:
            return self._spec.task.reward_deadline_s
        longest = self._spec.deadlines.start_s
        return longest if self._say is not None else min(LONGEST_S, longest)

    def _tell(self, say: Callable[[str], None]) -> None:
        """Say what takes long, once."""
        if self._told != self._doing and time.monotonic() - self._since > _LONG_S:
            self._told = self._doing
            say(f"looking at the task before the start: {self._doing} takes long, {self._limit:g} s at most")

    def _memory(self) -> int:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            family = [root, *root.children(recursive=True)]
            return sum(_resident(one) for one in family)
        return 0

    def _wrong(self, trouble: str) -> Finding:
        lines = self._output.decode(errors="replace").strip().splitlines()
        last = f"; its last line: {shown(printable(lines[-1], 200))}" if lines else ""
        return Finding("task", f"{self._doing}: {trouble}{last}", wrong=True)


def _much(memory: int) -> str:
    most = f"{MOST_MEMORY / (1 << 30):.1f} are allowed here"
    return f"it takes {memory / (1 << 30):.1f} GiB of memory; {most}"


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0

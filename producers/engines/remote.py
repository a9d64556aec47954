"""The generator's end of the engine process: sends it orders and takes its reports.

The engine has a process of its own because Kafka, rewards and weights keep the generator's process busy. In
one process they would share an interpreter, and each step of the engine would wait for them.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe

import msgspec
import numpy as np

from infra.code import module
from infra.ranks.frames import kernel_time
from infra.supervise.argument_file import argument_file
from infra.supervise.children import kill, start_child
from infra.weights.patch import PatchFile
from producers.engines.engine import DrawnAnswer, EngineError, Installed, Pace, SampleRequest
from producers.engines.engine_messages import (
    Abort,
    AnswerReport,
    EngineOptions,
    GoOn,
    Handed,
    HandOver,
    Holds,
    Install,
    Order,
    Paced,
    Prepare,
    PreparedReport,
    Ready,
    Refused,
    Report,
    Rest,
    Rested,
    Submit,
    Took,
)

_LOOK_S = 0.5

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Report]).decode


class RemoteEngine:
    """An engine in a process of its own. `bell` is rung whenever a report comes."""

    def __init__(
        self, options: EngineOptions, bell: threading.Event, *, deadline_s: float,
        inherits: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`inherits`: descriptors that the engine process shall have, too: so it holds the same locks."""
        self._options, self._bell, self._deadline = options, bell, deadline_s
        self._inherits = list(inherits)
        self._orders: list[Order] = []
        self._made: list[AnswerReport] = []
        self._pace, self._tokens = Pace([], []), dict[str, int]()
        self._preparing: deque[PatchFile] = deque()  # kept until the engine process has read them
        self._digests: Mapping[str, str] | None = None
        self._until = 0.0  # by when the engine must have prepared or hashed weights
        self._reports: queue.SimpleQueue[list[Report]] = queue.SimpleQueue()
        # This thread always reads: else both ends could wait for the other to empty a full pipe.
        self._reader = threading.Thread(target=self._read, daemon=True, name="engine")

    def open(self) -> RemoteEngine:
        """Start the engine process. Return itself."""
        self._link, theirs = Pipe()
        with socket.socket(fileno=os.dup(self._link.fileno())) as ours:  # an engine may stand still
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, kernel_time(self._deadline))
        with argument_file(msgspec.json.encode(self._options)) as said:
            self._process = start_child(
                [
                    sys.executable, "-m", module("producers.engines.engine_process"), str(said),
                    str(theirs.fileno()),
                ],
                pass_fds=[said, theirs.fileno(), *self._inherits],
            )  # fmt: skip
        theirs.close()
        self._reader.start()
        return self

    @property
    def pid(self) -> int:
        """The id of the engine process."""
        return self._process.pid

    def wait_until_ready(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the engine can take requests. Raises EngineError if that takes too long.

        `check` is called meanwhile, and may raise to end the wait.
        """
        with_machines = 2 if self._options.far else 1  # first it waits for other machines as long
        deadline_s = with_machines * self._deadline
        until = time.monotonic() + deadline_s
        while self._reports.empty() and time.monotonic() < until:
            check()
            self._bell.wait(_LOOK_S)
            self._bell.clear()
        self._await(Ready, f"to be ready ({deadline_s:.0f} s in all)", max(until - time.monotonic(), _LOOK_S))

    def submit(self, request: SampleRequest) -> None:
        self._orders.append(Submit(request))

    def abort(self, ids: Sequence[str]) -> None:
        self._orders.append(Abort(list(ids)))

    def step(self, wait_s: float) -> list[DrawnAnswer]:
        self._flush()
        if not self._made and self._reports.empty():
            self._bell.wait(wait_s)
            self._bell.clear()
        self._take_all()
        made, self._made = self._made, []
        return [answer_of(report) for report in made]

    def hand_over(self, ids: Sequence[str]) -> list[DrawnAnswer]:
        self._orders.append(HandOver(list(ids)))
        self._flush()
        handed = self._await(Handed, "to hand over samples")
        assert isinstance(handed, Handed)
        return [answer_of(part) for part in handed.parts]

    def unfinished(self) -> dict[str, int]:
        return self._tokens

    def pace(self) -> Pace:
        return self._pace

    def prepare(self, patch: PatchFile) -> None:
        self._preparing.append(patch)
        self._until = time.monotonic() + self._deadline
        self._orders.append(Prepare(str(patch.path)))
        self._flush()

    def is_ready(self) -> bool:
        self._take_all()
        if self._preparing and time.monotonic() > self._until:
            raise self._late("to prepare weights")
        return not self._preparing

    def install(self, *, recompute: bool) -> Installed:
        self._digests = None
        self._orders.append(Install(recompute))
        self._flush()
        took = self._await(Took, "to install weights")
        assert isinstance(took, Took)
        self._until = time.monotonic() + self._deadline
        return took.installed

    def rest(self) -> None:
        self._orders.append(Rest())
        self._flush()
        self._await(Rested, "to rest")

    def go_on(self) -> None:
        self._orders.append(GoOn())
        self._flush()

    def digests(self) -> Mapping[str, str] | None:
        self._take_all()
        if self._digests is None and time.monotonic() > self._until:
            raise self._late("to hash weights")
        return self._digests

    def close(self) -> None:
        kill(self._process)
        self._reader.join()
        self._link.close()

    def _flush(self) -> None:
        if self._orders:
            try:
                self._link.send_bytes(_encode(self._orders))
            except BlockingIOError:
                raise self._late("to take orders") from None
            except OSError:
                pass  # it has ended: its last report says why
            self._orders.clear()

    def _await(self, kind: type[Report], what: str, deadline_s: float | None = None) -> Report:
        """Wait for the next report of a kind. `deadline_s`: by default the one of this engine."""
        until = time.monotonic() + (deadline_s or self._deadline)
        while True:
            for report in self._take(max(0.0, until - time.monotonic()), what):
                if isinstance(report, kind):
                    return report

    def _take_all(self) -> None:
        """Take all reports that have come."""
        while not self._reports.empty():
            self._take()

    def _take(self, wait_s: float = 0.0, what: str = "") -> list[Report]:
        """Take the next reports, and keep the samples in them."""
        try:
            reports = self._reports.get(timeout=wait_s)
        except queue.Empty:
            raise self._late(what) from None
        if not reports:
            status = self._process.wait()
            raise EngineError(
                f"the engine process ended with status {status}; the log above has its last words"
            )
        for report in reports:
            if isinstance(report, Refused):
                failed = EngineError(report.reason)
                failed.lasting = report.lasting
                raise failed
            if isinstance(report, AnswerReport):
                self._made.append(report)
            if isinstance(report, Paced):
                self._pace, self._tokens = report.pace, report.tokens
            if isinstance(report, PreparedReport):
                self._preparing.popleft()
            if isinstance(report, Holds):
                self._digests = report.digests
        return reports

    def _late(self, what: str) -> EngineError:
        return EngineError(f"the engine process took more than {self._deadline:.0f} s {what}")

    def _read(self) -> None:
        try:
            while True:
                self._reports.put(_decode(self._link.recv_bytes()))
                self._bell.set()
        except (EOFError, OSError):
            self._reports.put([])  # marks the end
            self._bell.set()


def answer_of(report: AnswerReport) -> DrawnAnswer:
    """Return the answer in a message."""
    tokens, logprobs = np.frombuffer(report.tokens, np.int32), np.frombuffer(report.logprobs, np.float32)
    layers, taken, width = report.routed
    routes = None
    if layers:
        routes = np.frombuffer(report.routes, np.dtype(f"u{width}")).reshape(-1, layers, taken)
    return DrawnAnswer(report.id, tokens, logprobs, report.finish, routes)

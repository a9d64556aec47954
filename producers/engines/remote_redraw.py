"""The other end of the engine process that draws recorded samples again.

The lines that libraries print there are shown only if the process ends by itself.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from multiprocessing import Pipe

import msgspec

from infra.code import module
from infra.supervise.children import kill, start_child
from producers.engines.engine import DrawnAnswer, EngineError
from producers.engines.engine_messages import AnswerReport, EngineOptions, Ready, Refused, Report
from producers.engines.redrawing import RedrawBatch
from producers.engines.remote import answer_of
from schemas.shortening import printable

_SHOWN = 2_000  # characters
_encode = msgspec.msgpack.Encoder().encode
_reports = msgspec.msgpack.Decoder(list[Report])


class RedrawEngine:
    """An engine in a process of its own that draws batches of recorded samples."""

    def __init__(self, options: EngineOptions, *, start_s: float) -> None:
        """`start_s`: how long a start may take. A batch may take as long as it likes."""
        self._options, self._start_s = options, start_s

    def open(self) -> RedrawEngine:
        """Start the process, and wait until the engine is there. Return itself."""
        self._link, theirs = Pipe()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115, closed in close
        self._process = start_child(
            [
                sys.executable, "-m", module("producers.engines.redraw_process"),
                msgspec.json.encode(self._options).decode(), str(theirs.fileno()),
            ],
            pass_fds=[theirs.fileno()], stdout=self._printed, stderr=self._printed,
        )  # fmt: skip
        theirs.close()
        try:
            while not any(isinstance(one, Ready) for one in self._take(self._start_s)):
                pass
        except BaseException:
            self.close()
            raise
        return self

    def draw(self, batch: RedrawBatch) -> list[DrawnAnswer] | None:
        """Draw a batch. Return None if it was out of step: then its samples have to be drawn one by one."""
        with contextlib.suppress(OSError):  # it has ended: its last report says why
            self._link.send_bytes(_encode(batch))
        found = self._take(None)
        answers = [answer_of(one) for one in found if isinstance(one, AnswerReport)]
        return answers or None

    def close(self) -> None:
        """End the process."""
        kill(self._process)
        self._link.close()
        self._printed.close()

    def _take(self, wait_s: float | None) -> list[Report]:
        if not self._link.poll(wait_s):
            raise EngineError(f"the engine process took more than {wait_s:.0f} s to start")
        try:
            reports = _reports.decode(self._link.recv_bytes())
        except (EOFError, OSError):
            status = self._process.wait()
            raise EngineError(
                f"the engine process ended with status {status}; its last lines:\n{self._last_lines()}"
            ) from None
        for one in reports:
            if isinstance(one, Refused):
                raise EngineError(one.reason)
        return reports

    def _last_lines(self) -> str:
        self._printed.seek(max(0, self._printed.seek(0, 2) - _SHOWN))
        return printable(self._printed.read().decode(errors="replace"), _SHOWN)

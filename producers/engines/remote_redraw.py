"""The other end of the engine process that draws recorded samples again.

The lines that libraries print there are shown only if the process ends by itself.
"""

from __future__ import annotations

import msgspec

from infra.supervise.quiet_child import ChildEnded, QuietChild
from producers.engines.engine import DrawnAnswer, EngineError
from producers.engines.engine_messages import AnswerReport, EngineOptions, Ready, Refused, Report
from producers.engines.redrawing import RedrawBatch
from producers.engines.remote import answer_of

_encode = msgspec.msgpack.Encoder().encode
_reports = msgspec.msgpack.Decoder(list[Report])


class RedrawEngine:
    """An engine in a process of its own that draws batches of recorded samples."""

    def __init__(self, options: EngineOptions, *, start_s: float) -> None:
        """`start_s`: how long a start may take. A batch may take as long as it likes."""
        self._options, self._start_s = options, start_s

    def open(self) -> RedrawEngine:
        """Start the process, and wait until the engine is there. Return itself."""
        self._child = QuietChild("producers.engines.redraw_process", self._options).open()
        try:
            while not any(isinstance(one, Ready) for one in self._take(self._start_s)):
                pass
        except BaseException:
            self.close()
            raise
        return self

    def draw(self, batch: RedrawBatch) -> list[DrawnAnswer] | None:
        """Draw a batch. Return None if it was out of step: then its samples have to be drawn one by one."""
        self._child.send(_encode(batch))
        found = self._take(None)
        answers = [answer_of(one) for one in found if isinstance(one, AnswerReport)]
        return answers or None

    def close(self) -> None:
        """End the process."""
        self._child.close()

    def _take(self, wait_s: float | None) -> list[Report]:
        try:
            data = self._child.receive(wait_s)
        except ChildEnded as ended:
            raise EngineError(f"the engine process {ended}") from None
        if data is None:
            raise EngineError(f"the engine process took more than {wait_s:.0f} s to start")
        reports = _reports.decode(data)
        for one in reports:
            if isinstance(one, Refused):
                raise EngineError(one.reason)
        return reports

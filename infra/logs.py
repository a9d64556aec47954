"""Log lines that each carry run, role and step."""

from __future__ import annotations

import logging
import sys

_step: int | None = None


def at_step(step: int) -> None:
    """Set the step that this process's log lines carry from now on."""
    global _step
    _step = step


class _Where(logging.Formatter):
    def __init__(self, run: str, role: str) -> None:
        super().__init__("%(asctime)s %(where)s %(levelname)s %(message)s", "%H:%M:%S")
        self._run, self._role = run, role

    def format(self, record: logging.LogRecord) -> str:
        step = "" if _step is None else f" step {_step}"
        record.where = f"{self._run} {self._role}{step}"
        return super().format(record)


def set_up(run: str, role: str) -> logging.Logger:
    """Set up and return the process's logger, which writes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Where(run, role))
    log = logging.getLogger("streamrl")
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
    return log

"""The gate: the one place through which records of a topic become messages, or are refused with a reason.

    record ──► readable? ──► well-formed in itself? ──► of this run? ──► fit for this reader? ──► message
                  └──────────────────┴──────────────────────┴────────────────────┴──► refuse(record, reason)

Whatever is in a record, the gate raises nothing of its own: a record can't end a process, nor the next one
that meets it. `refuse` decides about it: a dead letter where this reader is the one that reports it
(`Context.dead_letter`), nothing where another one does (`passed_over`), an error where to skip it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic

from infra.bus import Record
from schemas.wire import MessageT, Unreadable, decode

Refuse = Callable[[Record, str], None]


def passed_over(record: Record, reason: str) -> None:
    """Another reader of the topic reports it."""


class Gate(Generic[MessageT]):
    """Takes the messages of one kind out of the records of a topic."""

    def __init__(
        self, kind: type[MessageT], run: str, refuse: Refuse, *,
        unfit: Callable[[MessageT], str] = lambda message: "", foreign: Refuse | None = None,
    ) -> None:  # fmt: skip
        """`unfit`: why a message is of no use to this reader; empty if it is.

        `foreign`: who decides about messages of another run, if that is not `refuse`.
        """
        self._kind, self._run, self._refuse, self._unfit = kind, run, refuse, unfit
        self._foreign = foreign or refuse

    def take(self, records: Iterable[Record]) -> Iterator[tuple[Record, MessageT]]:
        """Those that may pass, in order."""
        for record in records:
            if (message := self.take_one(record)) is not None:
                yield record, message

    def messages(self, records: Iterable[Record]) -> list[MessageT]:
        """The same, where nobody asks where they stood."""
        return [message for _, message in self.take(records)]

    def take_one(self, record: Record) -> MessageT | None:
        """A record's message; None if it was refused."""
        refuse = self._refuse
        try:
            message = decode(record.value, self._kind)
            if reason := self._of_another(message):
                refuse = self._foreign
            else:
                reason = self._unfit(message)
        except Unreadable as error:
            message, reason = None, str(error)
        except Exception as error:  # nothing that a record holds ends a process
            message, reason = None, f"it can't be understood: {type(error).__name__}: {error}"
        if reason:
            refuse(record, reason)
            return None
        return message

    def _of_another(self, message: Any) -> str:
        return "" if message.run == self._run else f"it is of run {message.run}"

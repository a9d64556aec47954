"""The gate turns records of a topic into messages, or refuses them with a reason. All readers use it.

    record ──► readable? ──► well-formed in itself? ──► of this run? ──► fit for this reader? ──► message
                  └──────────────────┴──────────────────────┴────────────────────┴──► refuse(record, reason)

The gate itself never raises, whatever a record holds: no record can end a process, or the one that is started
next. The reader's `refuse` decides what a refusal leads to: a dead letter if this reader reports the topic's
bad records (`RoleContext.dead_letter`), nothing if another reader does (`passed_over`), or an error if
passing over the record would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic

from infra.bus import Record
from schemas.wire import MessageT, Unreadable, decode

Refuse = Callable[[Record, str], None]


def passed_over(record: Record, reason: str) -> None:
    """Ignore a refused record, because another reader of the topic reports it."""


class Gate(Generic[MessageT]):
    """Turns records of a topic into messages of one kind."""

    def __init__(
        self, kind: type[MessageT], run: str, refuse: Refuse, *,
        unfit: Callable[[MessageT], str] = lambda message: "", foreign: Refuse | None = None,
    ) -> None:  # fmt: skip
        """`unfit` returns why a message is of no use to this reader; empty if it is of use.

        `foreign` is called for messages of another run; None means that `refuse` is.
        """
        self._kind, self._run, self._refuse, self._unfit = kind, run, refuse, unfit
        self._foreign = foreign or refuse

    def take(self, records: Iterable[Record]) -> Iterator[tuple[Record, MessageT]]:
        """Yield the records that are not refused, each with its message, in order."""
        for record in records:
            if (message := self.take_one(record)) is not None:
                yield record, message

    def messages(self, records: Iterable[Record]) -> list[MessageT]:
        """Return the messages of the records that are not refused, in order."""
        return [message for _, message in self.take(records)]

    def take_one(self, record: Record) -> MessageT | None:
        """Return a record's message; None if it was refused."""
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

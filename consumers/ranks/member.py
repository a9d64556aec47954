"""A rank other than the first, as rank 0 sees it: it takes commands, replies, and may end."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from consumers.ranks.rank_wire import CommandDone, Failed, Reply
from infra.ranks.rank_addresses import RanksError
from infra.waiting import Wait, WaitedTooLong

_BUSY_S = 0.1  # of processor time in a second: a rank that uses more computes; an open connection costs less


class RankDied(RanksError):
    """Raised when a rank ended unasked; the message says which one, how, and its last lines."""


class RankFailed(RanksError):
    """Raised when a rank met an error. `batch`: index in the command of the failed micro-batch, or -1."""

    def __init__(self, number: int, failed: Failed) -> None:
        super().__init__(f"rank {number}: {failed.reason}")
        self.number, self.batch, self.reason = number, failed.batch, failed.reason


class RanksApart(RanksError):
    """Raised when ranks have other weights than rank 0; the message names them and the step."""


class OtherRank(ABC):
    """A rank that takes commands. `died` is set when any member ends."""

    def __init__(self, number: int, died: threading.Event) -> None:
        self.number = number
        self.ended, self.ended_at = threading.Event(), 0.0
        self._died = died

    @property
    @abstractmethod
    def name(self) -> str:
        """The rank's name in messages for people."""

    @abstractmethod
    def send(self, data: msgspec.Struct, deadline_s: float) -> None:
        """Send a command. The deadline counts only while the rank uses no processor."""

    @abstractmethod
    def hang_up(self) -> None:
        """Send no more commands: the rank ends by itself."""

    @abstractmethod
    def close(self, grace_s: float) -> None:
        """End a rank that was told so, after `grace_s` seconds."""

    @abstractmethod
    def _comes(self, seconds: float) -> bool:
        """Wait so long at most, and return whether `_reply` finds something, be it the end."""

    @abstractmethod
    def _reply(self) -> Reply | None:
        """Return the next reply; None if the rank is gone."""

    @abstractmethod
    def has_said(self) -> bool:
        """Return whether the rank said something before it ended that was not read yet."""

    @abstractmethod
    def _used_s(self) -> float:
        """Return the processor seconds that the rank has used, as far as is known."""

    @abstractmethod
    def how(self) -> str:
        """Return in words how the rank ended, with what it said last."""

    def _has_ended(self) -> None:
        self.ended_at = time.monotonic()
        self.ended.set()
        self._died.set()

    def reply(self, deadline_s: float) -> CommandDone:
        """Return the reply to the last command. The deadline counts only while the rank uses no processor."""
        if not deadline_s and not self._comes(0.0):
            raise WaitedTooLong(f"{self.name} has not answered yet")
        self._wait(self._comes, f"a reply of {self.name}", deadline_s)
        reply = self._reply()
        if reply is None:
            raise EOFError
        if isinstance(reply, Failed):
            raise RankFailed(self.number, reply)
        return reply

    def _wait(self, ready: Callable[[float], bool], what: str, deadline_s: float) -> None:
        """Wait until `ready`, which waits so long at most; time counts while the rank uses no processor."""
        wait = Wait(what, unblocked_by="that process", deadline_s=deadline_s)
        used = 0.0
        while not ready(min(1.0, deadline_s)):
            before, used = used, self._used_s()
            wait.progress() if used - before > _BUSY_S else wait.check()

    def obituary(self) -> RanksError:
        """Return the error that tells why the rank ended."""
        with contextlib.suppress(EOFError, WaitedTooLong):
            while True:
                try:
                    self.reply(0.0)  # drop replies to earlier commands
                except RankFailed as failed:
                    return failed
        return RankDied(f"{self.name} {self.how()}")

"""The place where ranks of other machines wait, once they were let in, until enough have come."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from infra.waiting import Wait, WaitedTooLong

_LOOK_S = 0.5


class Guest(Protocol):
    """A rank or a machine that waits."""

    @property
    def is_gone(self) -> bool:
        """Whether it has closed its connection."""

    def drop(self) -> None:
        """Close the connection. It tries again then."""


_Guest = TypeVar("_Guest", bound=Guest)


class WaitingRoom(Generic[_Guest]):
    """Holds guests until some of them are enough."""

    def __init__(self) -> None:
        self._come: list[_Guest] = []
        self._changed, self._shut = threading.Condition(), False
        self._refusal = ""  # why the last one was turned away that came

    def enter(self, guest: _Guest) -> int:
        """Take a guest in. Return how many are here; 0 if nobody is taken any more, and it was dropped."""
        with self._changed:
            if not self._shut:
                self._come.append(guest)
                self._changed.notify_all()
                return len(self._come)
        guest.drop()
        return 0

    def turned_away(self, reason: str) -> None:
        """Remember why one that came may not enter: whoever waits here in vain is told."""
        self._refusal = reason

    def chosen(
        self, choose: Callable[[list[_Guest]], list[_Guest]], wait: Wait,
        ended: Callable[[], bool] = lambda: False,
    ) -> list[_Guest]:  # fmt: skip
        """Return those that `choose` takes, once it takes some; the others are dropped. Nobody enters then.

        Raises EOFError if `ended` says so, and WaitedTooLong by the wait's deadline.
        """
        with self._changed:
            while not (taken := choose(self._here())):
                if ended():
                    raise EOFError
                self._check(wait)
                self._changed.wait(_LOOK_S)
            self._shut = True
            self._come = [one for one in self._come if one not in taken]
        self.close()
        return taken

    def _check(self, wait: Wait) -> None:
        try:
            wait.check()
        except WaitedTooLong as error:
            if not self._refusal:
                raise
            raise WaitedTooLong(f"{error}. One came, and was turned away: {self._refusal}") from None

    def close(self) -> None:
        """Send away all who wait, and whoever comes later."""
        with self._changed:
            self._shut = True
            left, self._come = self._come, []
        for one in left:
            one.drop()

    def _here(self) -> list[_Guest]:
        for one in [one for one in self._come if one.is_gone]:
            self._come.remove(one)
            one.drop()
        return list(self._come)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side of a connection, which has nothing to say yet, has closed it."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True

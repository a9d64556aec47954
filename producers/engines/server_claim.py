"""Says to which generator a server of vLLM belongs: one server serves one generator.

claim ──► heard ──► heard … every few seconds, and with each call      the generator's
                └──► silent for CLAIM_S, and none of its calls under way ──► whoever claims next has it

A generator that was silent for long and comes back still has the server if nobody has claimed it in between:
then nothing was changed there, for what changes a server needs its claim.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from producers.engines.server_facts import CLAIM_S


class NotClaimed(Exception):
    """A call has no right to change the server; the message says why."""


@dataclass
class _Owner:
    token: str
    name: str
    heard_at: float
    under_way: int = 0  # calls

    def has(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())


class ServerClaim:
    """The claim of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owner: _Owner | None = None
        self.owners = 0  # so far; one that has it again after another one counts twice

    def take(self, token: str, name: str) -> None:
        """Let a generator have the server. Raises NotClaimed if another one has it."""
        owner, now = self._owner, self._clock()
        if owner is not None and owner.has(token):
            owner.heard_at = now
        elif owner is not None and (owner.under_way or now - owner.heard_at < CLAIM_S):
            raise NotClaimed(f"it belongs to {owner.name}")
        else:
            self._owner = _Owner(token, name, now)
            self.owners += 1

    def release(self, token: str) -> None:
        """Let any generator have the server."""
        self._checked(token, "a release")
        self._owner = None

    def _checked(self, token: str, call: str) -> _Owner:
        """Return the owner if a call is its own. Raises NotClaimed."""
        owner = self._owner
        if owner is None or not owner.has(token):
            whose = "it belongs to no generator" if owner is None else f"it belongs to {owner.name}"
            raise NotClaimed(f"{whose}, and {call} needs the claim of the one that it belongs to")
        return owner

    @contextmanager
    def during(self, token: str, call: str) -> Iterator[None]:
        """Do a call of the owner's; nobody else gets the server meanwhile. Raises NotClaimed."""
        owner = self._checked(token, call)
        owner.under_way += 1
        try:
            yield
        finally:
            owner.under_way -= 1
            owner.heard_at = self._clock()

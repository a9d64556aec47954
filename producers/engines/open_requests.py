"""The open requests of a sampler, as arrays by slot: so a step does no work in Python for each of its rows.

Logprobs that a GPU computes are not waited for: they are taken in when they have come, at a later step or
when their request ends. By then its tokens have come, and those are copied after the logprobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

_NOBODY = 0  # the slot of rows whose request is not open


class Arrival(Protocol):
    """Says whether a copy has come: a CUDA event."""

    def query(self) -> bool:
        """Return whether it has come."""

    def synchronize(self) -> object:
        """Wait until it has come."""


_Fetch = Callable[[torch.Tensor], tuple[torch.Tensor, Arrival | None]]


def fetched(values: torch.Tensor) -> tuple[torch.Tensor, Arrival | None]:
    """Return values in main memory, and what says when they are there; None: they are there now."""
    if not values.is_cuda:
        return values, None
    copy = values.to("cpu", non_blocking=True)  # torch puts it into pinned memory
    event = torch.cuda.Event()
    event.record()
    return copy, event


@dataclass(frozen=True, slots=True)
class LateLogprobs:
    """Logprobs of one draw, which may be on their way."""

    number: int  # of the draw
    slots: np.ndarray
    at: np.ndarray
    values: torch.Tensor
    arrival: Arrival | None


class OpenRequests:
    """Seeds, earlier tokens and logprobs of the requests that are open."""

    def __init__(self, fetch: _Fetch = fetched) -> None:
        self._fetch = fetch
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._late: deque[LateLogprobs] = deque()
        self._draws = 0
        # by slot:
        self.seeds = np.zeros(1, np.uint64)
        self.before = np.zeros(1, np.int64)  # tokens that other engines drew
        self._drawn = np.zeros(1, np.int64)  # tokens, with those on their way
        self._latest = np.zeros(1, np.int64)  # the number of the draw that drew last for it
        self._logprobs = np.zeros((1, 64), np.float32)

    def open(self, name: str, seed: int, before: int) -> None:
        """Give a request a slot."""
        if not self._free:
            self._grow()
        self._slots[name] = slot = self._free.pop()
        self.seeds[slot], self.before[slot] = seed, before
        self._drawn[slot] = self._latest[slot] = 0

    def slot(self, name: str) -> int:
        """Return a request's slot."""
        return self._slots.get(name, _NOBODY)

    def drawn(self, name: str) -> int:
        """Return how many tokens were drawn for a request here, with those that nobody has seen yet."""
        return int(self._drawn[self._slots[name]])

    def put(self, slots: np.ndarray, at: np.ndarray, logprobs: torch.Tensor) -> None:
        """Keep the logprobs of the tokens `at` of the requests in some slots.

        A slot may come several times, with its tokens in order. A token that is drawn again takes the place
        of the one before and of those behind it: it was drawn while the prompt was not whole.
        """
        self._draws += 1
        self._drawn[slots], self._latest[slots] = at + 1, self._draws
        values, arrival = self._fetch(logprobs)
        self._late.append(LateLogprobs(self._draws, slots, at, values, arrival))
        while self._late and ((there := self._late[0].arrival) is None or there.query()):
            self._take()

    def close(self, name: str, tokens: int | None = None) -> np.ndarray:
        """End a request. Return the logprobs of its first tokens, by default of all that were drawn."""
        slot = self._slots.pop(name)
        drawn = int(self._drawn[slot])
        tokens = drawn if tokens is None else min(tokens, drawn)
        # One draw may be under way for a token behind the request's end. It is not waited for.
        last = int(self._latest[slot]) - (drawn > tokens)
        while self._late and self._late[0].number <= last:
            self._take()
        self._free.append(slot)
        return self._logprobs[slot, :tokens].copy()

    def drop(self, name: str) -> None:
        """End a request whose logprobs nobody wants."""
        self._free.append(self._slots.pop(name))

    def _take(self) -> None:
        """Take in the oldest logprobs, and wait for them if need be.

        A slot may have another request by now. Its own logprobs come later, and take their place.
        """
        late = self._late.popleft()
        if late.arrival is not None:
            late.arrival.synchronize()
        self._widen(int(late.at.max(initial=0)) + 1)
        self._logprobs[late.slots, late.at] = late.values.numpy()

    def _grow(self) -> None:
        """Make room for twice as many requests."""
        slots = len(self.seeds)
        self._free += range(2 * slots - 1, slots - 1, -1)
        self.seeds, self.before, self._drawn, self._latest = (
            np.concatenate([array, np.zeros_like(array)])
            for array in (self.seeds, self.before, self._drawn, self._latest)
        )
        self._logprobs = np.concatenate([self._logprobs, np.zeros_like(self._logprobs)])

    def _widen(self, tokens: int) -> None:
        """Make room for so many tokens a request."""
        rows, width = self._logprobs.shape
        if tokens > width:
            wider = np.zeros((rows, max(tokens, 2 * width)), np.float32)
            wider[:, :width] = self._logprobs
            self._logprobs = wider

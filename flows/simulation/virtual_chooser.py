"""Choices of the dispatch policy in virtual time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from producers.dispatch.deadline import DeadlinePolicy
from producers.dispatch.policies.policy import Policy
from producers.dispatch.warm import choose_once


class VirtualChooser:
    """Makes a choice at once, and has its result some seconds later on the virtual clock.

    `seconds`: tells how many, from those that this machine's CPU took. Only if it does not look at these, a
    result is repeatable.
    """

    def __init__(self, seconds: Callable[[float], float]) -> None:
        self._seconds = seconds
        self._found: tuple[Any, float] | None = None
        self.wakes_at = float("inf")
        self.each_s: list[float] = []  # of CPU
        self.spent_s = 0.0  # of CPU, in all

    def begin(self, work: Callable[[], Any], now: float) -> None:
        """Do the work."""
        began = time.thread_time()
        result = work()
        seconds = time.thread_time() - began
        self.spent_s += seconds
        self.each_s.append(seconds)
        told = self._seconds(seconds)
        self._found, self.wakes_at = (result, told), now + told

    def take(self, now: float) -> tuple[Any, float] | None:
        """Return the result when it is time for it."""
        if self._found is None or now < self.wakes_at:
            return None
        found, self._found, self.wakes_at = self._found, None, float("inf")
        return found

    def rests(self, now: float) -> bool:
        """Return that it never rests."""
        return False


def as_measured(cpu_s: float) -> float:
    """Return that a choice is there after the CPU seconds that it took."""
    return cpu_s


def usual_of(policy: Policy) -> Callable[[float], float]:
    """Return what tells how long a policy's choices usually take, by the number of their jobs."""
    return lambda cpu_s: policy.usual_choice_s if isinstance(policy, DeadlinePolicy) else 0.0


@functools.cache
def _compile() -> None:
    """Compile the code that chooses, which a run does in a thread."""
    choose_once()


def choose_virtually(policy: Policy, seconds: Callable[[float], float]) -> VirtualChooser:
    """Have a policy's choices made in virtual time. Return who makes them."""
    chooser = VirtualChooser(seconds)
    if isinstance(policy, DeadlinePolicy):
        _compile()
        policy.chooser, policy.warm = chooser, lambda: True
    return chooser

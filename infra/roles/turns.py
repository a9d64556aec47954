"""Turns on one machine: in a colocated run either its engines draw or its learner computes, never both.

    wanted    the learner has it alone, from when it wants the turn until it passes the turn on
    working   all engines share it while they may draw; the learner has it alone while it computes

learner   all samples are there ──► take `wanted` ──► the engines rest ──► take `working` ──► compute
engines   `wanted` is free? share `working`, draw ──► `wanted` is taken: rest, and let go of `working`

Both are locks of the kernel on files of this machine, one pair for each run. A process that is killed lets go
of them at once, so the other side goes on. On other machines the files are others: whoever is there has cores
of its own, and need not wait. No record says whose turn it is, so none can be lost or be out of date.

waits for                unblocked by
the engines to rest      the generators on this machine
the learner's turn       the trainer
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from infra.files.locks import SharedLock
from infra.roles.context import RoleContext
from infra.runs import RunRecord, unique_name
from infra.stack.paths import StackPaths

OTHERS_TURN = "the other's turn"  # the cause of time in which a process waits for its turn
TURN_LOOK_S = 0.01  # how often an engine's side looks whether the learner wants the turn
_SOON_S, _AGAIN_S = 0.001, 0.005  # between two tries of the learner, at first and later
_SOON = 20  # tries


class LearnersTurn(Protocol):
    """The learner's side."""

    def take(self) -> None:
        """Wait until the engines on this machine rest. Returns at once if they do already."""

    def pass_on(self, rest: Callable[[], None]) -> None:
        """Let the engines draw again. If it was the learner's turn, `rest` is called before."""

    def close(self) -> None:
        """Let the engines draw again, for good."""


class EnginesTurn(Protocol):
    """The side of one generator."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that the engine process inherits: while it lives, it has what the generator has."""

    def mine(self, *, may_rest: bool, rest: Callable[[], None]) -> bool:
        """Return whether the engine may draw now.

        `may_rest`: whether it could rest now. If the learner wants the turn and it can, `rest` is called, and
        then the turn is the learner's.
        """

    def close(self) -> None:
        """Let the learner compute, for good."""


def turn_files(record: RunRecord) -> tuple[Path, Path]:
    """Return the files of a run's two locks, `wanted` and `working`, on this machine."""
    folder, name = StackPaths.locate().home / "turns", unique_name(record)
    return folder / f"{name}.wanted", folder / f"{name}.working"


class _Locks:
    """The two locks of a run on this machine."""

    def __init__(self, context: RoleContext) -> None:
        what = f"the turn of run {context.run} on this machine"
        self.wanted, self.working = (SharedLock(file, what=what) for file in turn_files(context.record))

    def close(self) -> None:
        self.wanted.close()
        self.working.close()


class LearnersLocks:
    """The learner's side, by locks."""

    def __init__(self, context: RoleContext) -> None:
        self._context, self._locks = context, _Locks(context)
        self._wanted = self._mine = False

    def take(self) -> None:
        if self._try():
            return
        wait = self._context.wait(
            "the turn to compute: the engines on this machine draw", unblocked_by="the generators"
        )
        tries = 0
        while not self._try():
            self._context.check_stop()
            # a generator that looks at `wanted` holds it for a moment
            replaced = not self._wanted and tries >= _SOON
            self._context.heart.waiting(
                "an earlier trainer of this run to end" if replaced else "the engines to rest",
                unblocked_by="that trainer" if replaced else "generators", cause=OTHERS_TURN,
            )  # fmt: skip
            wait.check()
            time.sleep(_SOON_S if tries < _SOON else _AGAIN_S)
            tries += 1

    def _try(self) -> bool:
        self._wanted = self._wanted or self._locks.wanted.take(alone=True)
        self._mine = self._mine or (self._wanted and self._locks.working.take(alone=True))
        return self._mine

    def pass_on(self, rest: Callable[[], None]) -> None:
        if self._mine:
            rest()
            self._locks.working.give()
        if self._wanted:
            self._locks.wanted.give()
        self._wanted = self._mine = False

    def close(self) -> None:
        self._locks.close()


class EnginesLocks:
    """The side of one generator, by locks."""

    def __init__(self, context: RoleContext) -> None:
        self._locks = _Locks(context)
        self._mine = False

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self._locks.working.descriptor,)

    def mine(self, *, may_rest: bool, rest: Callable[[], None]) -> bool:
        if self._mine and not may_rest:
            return True
        if self._is_wanted():
            if self._mine:
                rest()
                self._locks.working.give()
                self._mine = False
        elif not self._mine:
            self._mine = self._locks.working.take(alone=False)
        return self._mine

    def _is_wanted(self) -> bool:
        if not self._locks.wanted.take(alone=False):
            return True
        self._locks.wanted.give()
        return False

    def close(self) -> None:
        self._locks.close()


class NoTurns:
    """Both sides where nobody takes turns: everyone works whenever there is work."""

    descriptors: tuple[int, ...] = ()

    def take(self) -> None: ...

    def pass_on(self, rest: Callable[[], None]) -> None: ...

    def mine(self, *, may_rest: bool, rest: Callable[[], None]) -> bool:
        return True

    def close(self) -> None: ...


def learners_turn(context: RoleContext) -> LearnersTurn:
    """Return the trainer's side, as the run's placement says."""
    return LearnersLocks(context) if context.spec.placement.takes_turns else NoTurns()


def engines_turn(context: RoleContext) -> EnginesTurn:
    """Return a generator's side, as the run's placement says."""
    return EnginesLocks(context) if context.spec.placement.takes_turns else NoTurns()

"""The dispatcher's core: what is admitted, who is there, who gets what. No clock, no bus.

admit, join, leave, finished, progress ──► board ──► turn(now) ──► (instance, jobs)
                                             ▲
                                           policy
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from producers.dispatch.board import Board, Instance
from producers.dispatch.policies import Policy
from producers.jobs import Job, Key


class Dispatcher:
    """Gives each job to one instance; one that is lost is given again."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._board = policy, Board()
        self._done: set[Key] = set()
        self._home: dict[Key, str] = {}
        self._ask: set[str] = set()  # instances with slots that have become free
        self._ask_all = False

    @property
    def waiting(self) -> int:
        """Jobs that no instance has."""
        return len(self._board.waiting)

    @property
    def instances(self) -> Sequence[str]:
        """Who is there."""
        return list(self._board.instances)

    def admit(self, jobs: Iterable[Job], now: float) -> None:
        """Jobs to be done, each once however often it is admitted."""
        fresh = [
            job
            for job in jobs
            if job.key not in self._done and job.key not in self._home and job.key not in self._board.waiting
        ]
        for job in fresh:
            self._board.waiting.add(job, job.prompt.predicted)
        if fresh:
            self._policy.admitted(self._board, fresh, now)
            self._ask_all = True

    def join(self, name: str, slots: int, seconds: np.ndarray, now: float) -> None:
        """An instance is there. One that is known is taken to have started anew: it runs nothing."""
        self._put_back(name)
        self._board.instances[name] = Instance(name, slots, seconds, now)
        self._policy.regrouped(self._board, now)
        self._ask_all = True

    def leave(self, name: str, now: float) -> int:
        """An instance is gone; what it ran waits again. Returns how many that were."""
        lost = self._put_back(name)
        if self._board.instances.pop(name, None) is not None:
            self._policy.regrouped(self._board, now)
            self._ask_all = True
        return lost

    def _put_back(self, name: str) -> int:
        instance = self._board.instances.get(name)
        if instance is None:
            return 0
        for key, job in instance.running.items():
            self._home.pop(key, None)
            self._board.waiting.add(job, job.prompt.predicted)
        lost = len(instance.running)
        instance.running.clear()
        return lost

    def finished(self, key: Key, length: int, now: float) -> None:
        """A sample is done, whoever did it: one that was thought lost may still arrive."""
        self._done.add(key)
        if key in self._board.waiting:
            self._board.waiting.remove(key)
            return
        name = self._home.pop(key, None)
        if name is None:
            return
        instance = self._board.instances[name]
        instance.advance(now)
        job = instance.end(key)
        assert job is not None
        self._policy.finished(self._board, instance, job, length, now)
        self._ask.add(name)

    def progress(self, name: str, tokens: Mapping[Key, int], now: float) -> None:
        """How far an instance is with what it runs."""
        if instance := self._board.instances.get(name):
            instance.advance(now)
            for key, count in tokens.items():
                instance.correct(key, count)

    def turn(self, now: float) -> dict[str, list[Job]]:
        """Fill free slots: the emptiest instance first, one job after the other."""
        given: dict[str, list[Job]] = {}
        board = self._board
        if not board.instances:
            return given
        for instance in board.instances.values():
            instance.advance(now)
        if self._policy.tick(board, now):
            self._ask_all = True
        asked = [i for i in board.fastest_first if i.free and (self._ask_all or i.name in self._ask)]
        self._ask_all = False
        self._ask.clear()
        while board.waiting and (chosen := self._policy.choose(board, asked, now)) is not None:
            instance, key = chosen
            job = board.waiting.remove(key)
            self._home[key] = instance.name
            instance.start(job)
            given.setdefault(instance.name, []).append(job)
        if board.waiting and not any(instance.running for instance in board.instances.values()):
            raise AssertionError("jobs wait, and no instance has any")
        return given

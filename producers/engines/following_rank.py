"""A rank of an engine that is not rank 0 does what rank 0 has done, in the same order, at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import msgspec

from infra.errors import Explained
from infra.weights.patch import read_patch
from producers.engines.engine import LocalEngine, SleepingEngine
from producers.engines.engine_messages import Abort, HandOver, Install, Prepare, Refused, Rest, Submit
from producers.engines.rank_marks import RankMarks
from producers.engines.rank_messages import Act, BesideAct, BesideReport, Decided, Did, SlicesHeld, Step
from producers.engines.same_work import DrawnSoFar, tokens_digest
from schemas.importing import said

_acts = msgspec.msgpack.Decoder(list[Act])
_beside = msgspec.msgpack.Decoder(BesideAct)
_encode = msgspec.msgpack.Encoder().encode


class FollowingEngine(LocalEngine, SleepingEngine, Protocol):
    """The engine of a rank, which may share its GPU with a learner."""


class FollowingRank:
    """Does what rank 0 has done, in the same order, between the same steps."""

    def __init__(self, link: Connection, engine: FollowingEngine, number: int, marks: RankMarks) -> None:
        self._link, self._engine, self._number, self._marks = link, engine, number, marks
        self._drawn = DrawnSoFar()

    def run(self) -> None:
        """Obey until the connection ends."""
        while True:
            for act in _acts.decode(self._link.recv_bytes()):
                self._obey(act)

    def _obey(self, act: Act) -> None:
        if isinstance(act, Submit):
            self._engine.submit(act.request)
        elif isinstance(act, Abort):
            self._engine.abort(act.ids)
        else:
            self._marks.begin(self._number)
            done = self._done(act)
            self._marks.end(self._number)
            if done is not None:
                self._link.send_bytes(_encode([Did(done)]))

    def _done(self, act: Act) -> bytes | None:
        """Do what all ranks do at once. Return what came of it, if rank 0 waits for that."""
        engine = self._engine
        if isinstance(act, Step):
            self._drawn.check(act.drawn, self._number)
            self._drawn.add(engine.step(0.0))
            return self._drawn.digest
        if isinstance(act, HandOver):
            self._drawn.add(engine.hand_over(act.ids))
            return self._drawn.digest
        if isinstance(act, Install):
            return tokens_digest(engine.install(recompute=act.recompute))
        if isinstance(act, Rest):
            engine.sleep()
        else:
            engine.wake()
        return self._drawn.digest


def heard(acts: Connection) -> Sequence[float]:
    """Wait for what rank 0 decides next, within a step that it makes, too."""
    (act,) = _acts.decode(acts.recv_bytes())
    assert isinstance(act, Decided)
    return act.numbers


def serve_beside(link: Connection, engine: LocalEngine) -> None:
    """Prepare and hash weights beside the steps of a rank, until the connection ends."""
    try:
        while True:
            act = _beside.decode(link.recv_bytes())
            link.send_bytes(_encode(_held(act, engine)))
    except (EOFError, OSError):
        pass  # rank 0 has ended, or its machine is lost


def _held(act: BesideAct, engine: LocalEngine) -> BesideReport:
    try:
        if isinstance(act, Prepare):
            engine.prepare(read_patch(Path(act.file)))
            return SlicesHeld({})
        return SlicesHeld(engine.digests())
    except Explained as error:
        return Refused(str(error), error.lasting)
    except Exception as error:
        return Refused(f"the rank failed beside its steps: {said(error)}")

"""The process of a rank of an engine that is not rank 0: it does what rank 0 does, at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from infra import choices
from infra.errors import Explained
from infra.supervise.argument_file import read_argument
from infra.weights.patch import read_patch
from infra.weights.slices import Slicing
from producers.engines.engine import LocalEngine
from producers.engines.engine_messages import Abort, HandOver, Install, Prepare, Refused, Rest, Submit
from producers.engines.engine_process import answer
from producers.engines.engine_ranks import rank_deadline_s
from producers.engines.other_engine_ranks import RankOptions, connections
from producers.engines.rank_group import EngineRank
from producers.engines.rank_marks import RankMarks
from producers.engines.rank_messages import Act, BesideAct, BesideReport, Decided, Did, SlicesHeld, Step
from producers.engines.same_work import DrawnSoFar, tokens_digest
from producers.engines.shared_plan import Share
from producers.engines.vllm_engine import VllmSettings
from producers.engines.vllm_in_process import VllmEngine
from schemas.generation import ENGINES
from schemas.importing import said
from schemas.runspec import RunSpec

_acts = msgspec.msgpack.Decoder(list[Act])
_beside = msgspec.msgpack.Decoder(BesideAct)
_encode = msgspec.msgpack.Encoder().encode


def main() -> None:
    """Serve rank 0 until it closes the connection."""
    options = msgspec.json.decode(read_argument(sys.argv[1]), type=RankOptions)
    acts, beside = connections(options)

    def serve(link: Connection, engine: LocalEngine) -> None:
        assert isinstance(engine, VllmEngine)
        work = lambda: serve_beside(beside, engine, options.local)  # noqa: E731
        threading.Thread(target=work, daemon=True, name="beside").start()
        FollowingRank(link, engine, options.number, RankMarks(Path(options.marks))).run()

    answer(acts, lambda: following_engine(options, lambda own: heard(acts)), serve)


def heard(acts: Connection) -> Sequence[float]:
    """Wait for what rank 0 decides next, within a step that it makes, too."""
    (act,) = _acts.decode(acts.recv_bytes())
    assert isinstance(act, Decided)
    return act.numbers


def following_engine(options: RankOptions, share: Share) -> VllmEngine:
    """Return the engine of this rank."""
    spec = RunSpec.model_validate_json(options.engine.spec)
    settings = ENGINES.loaded(spec.generator)
    assert isinstance(settings, VllmSettings)
    slicing = Slicing.of(Path(options.engine.model), settings.layout)
    rank = EngineRank(
        options.number, options.local, slicing, options.meeting, options.group, rank_deadline_s(spec), share
    )
    return settings.own_engine(options.engine.model, spec, rank)


class FollowingRank:
    """Does what rank 0 has done, in the same order, between the same steps."""

    def __init__(self, link: Connection, engine: VllmEngine, number: int, marks: RankMarks) -> None:
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
            self._drawn.add(engine.step())
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


def serve_beside(link: Connection, engine: VllmEngine, local: int) -> None:
    """Prepare and hash weights beside the steps of a rank, until the connection ends.

    `local`: its number among the ranks of its machine, and that of its GPU.
    """
    if choices.cuda():
        torch.cuda.set_device(local)  # else this thread would take memory of the first GPU
    try:
        while True:
            act = _beside.decode(link.recv_bytes())
            link.send_bytes(_encode(_held(act, engine)))
    except (EOFError, OSError):
        pass  # rank 0 has ended, or its machine is lost


def _held(act: BesideAct, engine: VllmEngine) -> BesideReport:
    try:
        if isinstance(act, Prepare):
            engine.prepare(read_patch(Path(act.file)))
            return SlicesHeld({})
        return SlicesHeld(engine.digests())
    except Explained as error:
        return Refused(str(error), error.lasting)
    except Exception as error:
        return Refused(f"the rank failed beside its steps: {said(error)}")


if __name__ == "__main__":
    main()

"""A rank of the trainer other than the first: `python -m consumers.ranks.rank`.

commands of rank 0 ──► the learner ──► replies
gradients, weights and state go over torch.distributed

Rank 0 starts it with a pipe each way. On another machine `consumers.ranks.far_rank` starts it, with the
connection that rank 0 has let in: `--connection DESCRIPTOR --model FOLDER --store URL`.

waits for   unblocked by
a command   rank 0; this process ends with it
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import socket
import sys

import msgspec

from consumers.batches.micro_batches import with_fillers
from consumers.learners import collective
from consumers.learners.collective import Seat
from consumers.learners.learner import LocalLearner
from consumers.learners.optimizing import NotFinite
from consumers.ranks.choose_learner import local_learner
from consumers.ranks.part_writer import PartWriter
from consumers.ranks.rank_link import ConnectionLink, PipeLink, RankLink
from consumers.ranks.rank_wire import (
    Accumulate,
    Adopt,
    BeginIteration,
    Command,
    CommandDone,
    Failed,
    RestCommand,
    RestoreCommand,
    RestorePart,
    ScoreCommand,
    Setup,
    SnapshotCommand,
    StateCommand,
    StepCommand,
    Weights,
    batch_from_bytes,
    scores_to_bytes,
)
from consumers.steps.checkpoint_manifest import Damaged
from infra.errors import Explained
from infra.logs import set_up
from infra.machine_kind import kind_of_machine
from infra.stores.store import StoreError
from schemas.importing import BadImport, said
from schemas.runspec import RunSpec

_GRACE_S = 3.0  # for the end of a trainer to be noticed


def obey(learner: LocalLearner, command: Command, writer: PartWriter) -> CommandDone:
    """Carry out a command of rank 0, and return the reply."""
    match command:
        case Accumulate(batches, rounds):
            found = learner.accumulate(with_fillers([batch_from_bytes(raw) for raw in batches], rounds))
            return CommandDone(stats=found[: len(batches)])
        case ScoreCommand(batches, needs, rounds):
            asked = with_fillers([batch_from_bytes(raw) for raw in batches], rounds)
            said = [learner.ask(batch, needs) for batch in asked]
            return CommandDone(scores=[scores_to_bytes(one) for one in said[: len(batches)]])
        case StepCommand(total):
            return CommandDone(weights=learner.step(total).weights.digest)
        case BeginIteration():
            learner.begin_iteration()
        case RestCommand():
            learner.rest()
        case Weights():
            learner.weights()
        case StateCommand():
            learner.parts()
        case SnapshotCommand(place):
            writer.begin(learner.snapshot(), place)
        case RestorePart(place):
            try:
                learner.restore(writer.checkpoints(place).stored(place))
            except StoreError as error:
                return CommandDone(unread=str(error), damaged=isinstance(error, Damaged))
        case Adopt(outlines):
            learner.adopt(collective.Shared(outlines))
        case RestoreCommand(outlines):
            with contextlib.suppress(collective.Withheld):  # rank 0 then sends another state, or ends
                learner.restore(collective.Shared(outlines))
    return CommandDone()


def own_spec(setup: Setup) -> RunSpec:
    """Return the run's settings for this rank.

    A reference that is the starting model is this machine's copy of that model, wherever it lies here.
    """
    spec = RunSpec.model_validate_json(setup.spec)
    if spec.loss.reference != setup.model:
        return spec
    return spec.model_copy(update={"loss": spec.loss.model_copy(update={"reference": None})})


def serve(link: RankLink, model: str | None = None, store: str | None = None) -> None:
    """Carry out commands until rank 0 closes the link.

    `model`, `store`: folder and URL on this machine, if not as rank 0 has them.
    """
    first = link.next()
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup | Failed)
    if isinstance(setup, Failed):
        sys.stderr.write(f"the trainer does not take this rank: {setup.reason}\n")
        raise SystemExit(1)
    log = set_up(setup.run, f"trainer-rank-{setup.number}")
    spec = own_spec(setup)
    seat = Seat(setup.number, setup.ranks, setup.local, link.address or setup.host)
    try:
        link.reply(CommandDone())  # slow imports are done: now rank 0 can join
        collective.join_ranks(seat, (setup.host, setup.port), spec.deadlines)
        gc.disable()  # it would take seconds, while millions of objects come and none goes
        learner = local_learner(model or setup.model, spec)
        gc.freeze()
        gc.enable()
        writer = PartWriter(log, store)
        log.info("rank %d of %d is ready", setup.number, setup.ranks)
        link.reply(CommandDone(machine=kind_of_machine()))
        while (frame := link.next()) is not None:
            link.reply(obey(learner, msgspec.msgpack.decode(frame, type=Command), writer))
        learner.close()
        collective.leave()
    except Exception as error:
        if link.is_lost(_GRACE_S):  # others meet errors of all kinds when a rank ends
            log.info("the trainer ended, and so does this rank (%s)", said(error))
            return
        if isinstance(error, Explained | NotFinite | BadImport):
            log.error("%s", error)
            link.reply(Failed(str(error), getattr(error, "batch", -1)))
        else:
            log.exception("failed")
            link.reply(Failed(repr(error)))
        raise SystemExit(1) from error


def main() -> None:
    """Serve on stdin and stdout, or on a connection; anything printed goes to the log."""
    parser = argparse.ArgumentParser(prog="python -m …rank", description="A rank of a run's trainer.")
    parser.add_argument("--connection", type=int, help="descriptor of a connection that rank 0 has let in")
    parser.add_argument("--model", help="folder of the starting model, if it is elsewhere on this machine")
    parser.add_argument("--store", help="URL of the run's store, if it is another on this machine")
    given = parser.parse_args()
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)
        if given.connection is None:
            serve(PipeLink(sys.stdin.buffer, replies))
        else:
            serve(ConnectionLink(socket.socket(fileno=given.connection)).open(), given.model, given.store)


if __name__ == "__main__":
    main()

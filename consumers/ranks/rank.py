"""A rank of the trainer other than the first: `python -m consumers.ranks.rank`, started by rank 0.

commands on stdin ──► the learner ──► replies on stdout
gradients, weights and state go over torch.distributed

waits for   unblocked by
a command   rank 0; this process ends with it
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import BinaryIO

import msgspec

from consumers.batches.micro_batches import with_fillers
from consumers.learners import collective
from consumers.learners.learner import LocalLearner
from consumers.learners.optimizing import NotFinite
from consumers.ranks.choose_learner import local_learner
from consumers.ranks.rank_wire import (
    Accumulate,
    Adopt,
    BeginIteration,
    Command,
    CommandDone,
    Failed,
    RestCommand,
    RestoreCommand,
    ScoreCommand,
    Setup,
    StateCommand,
    StepCommand,
    Weights,
    batch_from_bytes,
    read_frame,
    scores_to_bytes,
    write_frame,
)
from infra.errors import Explained
from infra.logs import set_up
from schemas.runspec import RunSpec


def obey(learner: LocalLearner, command: Command) -> CommandDone:
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
            learner.step(total)
        case BeginIteration():
            learner.begin_iteration()
        case RestCommand():
            learner.rest()
        case Weights():
            learner.weights()
        case StateCommand():
            learner.parts()
        case Adopt(outlines):
            learner.adopt(collective.Shared(outlines))
        case RestoreCommand(outlines):
            with contextlib.suppress(collective.Withheld):  # rank 0 then sends another state, or ends
                learner.restore(collective.Shared(outlines))
    return CommandDone()


def serve(commands: BinaryIO, replies: BinaryIO) -> None:
    """Carry out commands until rank 0 closes the pipe."""
    first = read_frame(commands)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    log = set_up(setup.run, f"trainer-rank-{setup.number}")
    spec = RunSpec.model_validate_json(setup.spec)
    try:
        write_frame(replies, CommandDone())  # slow imports are done: now rank 0 can join
        collective.join_ranks(setup.number, setup.ranks, setup.port, spec.deadlines.start_s)
        learner = local_learner(setup.model, spec)
        gc.freeze()
        log.info("rank %d of %d is ready", setup.number, setup.ranks)
        write_frame(replies, CommandDone())
        while (frame := read_frame(commands)) is not None:
            write_frame(replies, obey(learner, msgspec.msgpack.decode(frame, type=Command)))
        learner.close()
        collective.leave()
    except (Explained, NotFinite) as error:
        log.error("%s", error)
        write_frame(replies, Failed(str(error), getattr(error, "batch", -1)))
        raise SystemExit(1) from error
    except Exception as error:
        log.exception("failed")
        write_frame(replies, Failed(repr(error)))
        raise SystemExit(1) from error


def main() -> None:
    """Serve on stdin and stdout; anything printed goes to the log."""
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()

"""Several ranks as one learner: micro-batches are dealt out by cost, and all ranks step together.

rank 0   deal ──► own micro-batches ──► gradients added up ──► step
rank 1    └────►  its micro-batches  ──────────┘
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

from consumers.batches.micro_batches import MicroBatch, deal, with_fillers
from consumers.batches.training_rows import TrainingRow
from consumers.learners import collective
from consumers.learners.learner import LocalLearner, unscored, with_scores
from consumers.learners.lending import MadeWeights
from consumers.learners.optimizing import NotFinite, Stepped
from consumers.learners.snapshot import PartPlace, StateSnapshot
from consumers.losses.loss import Needs
from consumers.losses.objective import LossStats
from consumers.ranks.member import RankFailed
from consumers.ranks.rank_processes import RankProcesses
from consumers.ranks.rank_wire import (
    Accumulate,
    Adopt,
    BeginIteration,
    Command,
    CommandDone,
    RestCommand,
    RestoreCommand,
    RestorePart,
    ScoreCommand,
    SnapshotCommand,
    StateCommand,
    StepCommand,
    Weights,
    batch_to_bytes,
    scores_from_bytes,
)
from consumers.ranks.trainer_door import TrainerDoor
from consumers.steps.checkpoint_manifest import Damaged
from consumers.steps.divided_state import DividedState
from infra.stores.store import StoreError
from schemas.runspec import RunSpec

_Result = TypeVar("_Result")


class RankedLearner:
    """The learner that rank 0 works with: it has all ranks take part."""

    def __init__(
        self, model: str, spec: RunSpec, local: Callable[[str, RunSpec], LocalLearner], *, run: str,
        log: logging.Logger, door: TrainerDoor | None = None,
    ) -> None:  # fmt: skip
        self._ranks = spec.trainer.ranks
        self._steps = 0  # of the optimizer
        self._crew = RankProcesses(model, spec, run=run, log=log, door=door)
        try:
            self._crew.open()
            with self._crew.watched():
                self._crew.join()
                self._local = local(model, spec)
                self._crew.ready()
        except BaseException:
            self._crew.close()
            collective.leave()
            raise
        self.loss, self.vocabulary, self.base = self._local.loss, self._local.vocabulary, self._local.base

    def score(self, parts: Sequence[Sequence[TrainingRow]], needs: Needs) -> list[list[TrainingRow]]:
        batches = [unscored(rows, self.loss) for rows in parts]
        said = self._dealt(
            batches,
            lockstep=needs.before == "step" or self._local.scores_in_lockstep,
            command=lambda raw, rounds: ScoreCommand(raw, needs, rounds),
            own=lambda mine: [self._local.ask(batch, needs) for batch in mine],
            of_reply=lambda reply: [scores_from_bytes(raw) for raw in reply.scores],
        )
        return [with_scores(rows, scores) for rows, scores in zip(parts, said, strict=True)]

    def accumulate(self, batches: Sequence[MicroBatch]) -> list[LossStats]:
        return self._dealt(
            batches, lockstep=True, command=Accumulate, own=self._local.accumulate,
            of_reply=lambda reply: reply.stats,
        )  # fmt: skip

    def _dealt(
        self, batches: Sequence[MicroBatch], *, lockstep: bool,
        command: Callable[[list[bytes], int], Command],
        own: Callable[[list[MicroBatch]], list[_Result]], of_reply: Callable[[CommandDone], list[_Result]],
    ) -> list[_Result]:  # fmt: skip
        """Have each rank compute its share; return results in the order of the micro-batches."""
        shares = deal([batch.cost for batch in batches], self._ranks)
        rounds = max(map(len, shares)) if lockstep and self._local.lockstep else 0
        found: dict[int, _Result] = {}
        try:
            with self._crew.watched(), nullcontext() if rounds else self._crew.apart():
                for rank, share in enumerate(shares[1:], 1):
                    self._crew.send(rank, command([batch_to_bytes(batches[n]) for n in share], rounds))
                mine = with_fillers([batches[number] for number in shares[0]], rounds)
                found |= zip(shares[0], own(mine), strict=False)
                for share, reply in zip(shares[1:], self._crew.replies(), strict=True):
                    found |= zip(share, of_reply(reply), strict=True)
        except RankFailed as failed:
            if failed.batch < 0:
                raise
            error = NotFinite(failed.reason)
            share = shares[failed.number]
            if failed.batch < len(share):  # else it was a filler, which has no rows
                error.rows = batches[share[failed.batch]].rows
            raise error from failed
        return [found[number] for number in range(len(batches))]

    @contextmanager
    def _together(self, command: Command) -> Iterator[None]:
        """Have all other ranks carry out a command while this rank runs the body of the `with`."""
        with self._crew.watched():
            self._crew.send_all(command)
            yield
            self._crew.replies()

    def step(self, total: float) -> Stepped:
        """See Learner. Ranks that hold whole weights step them each: they must have the same ones then."""
        with self._crew.watched():
            self._crew.send_all(StepCommand(total))
            taken = self._local.step(total)
            self._steps += 1
            self._crew.check_weights(taken.weights.digest, self._steps)
        return taken

    def begin_iteration(self) -> None:
        with self._together(BeginIteration()):
            self._local.begin_iteration()

    def made(self) -> MadeWeights:
        with self._together(Weights()):
            return self._local.made()

    def snapshot(self, place: PartPlace | None = None) -> StateSnapshot:
        with self._together(SnapshotCommand(place) if self._local.shares_state else StateCommand()):
            return self._local.snapshot()

    def check(self) -> None:
        self._crew.check()

    def weights(self) -> dict[str, torch.Tensor]:
        with self._together(Weights()):
            return self._local.weights()

    def state(self) -> dict[str, torch.Tensor]:
        with self._together(StateCommand()):
            return self._local.state()

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        outlines = collective.Shared.outlines_of(weights)
        with self._together(Adopt(outlines)):
            self._local.adopt(collective.Shared(outlines, weights))

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._local.shares_state and isinstance(state, DividedState):
            self._restore_parts(state)
        else:
            self._restore_shared(state)
        self._steps = int(state["steps"])

    def _restore_shared(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state that rank 0 reads, and sends to the others."""
        outlines = collective.Shared.outlines_of(state)
        unread: list[StoreError] = []
        with self._together(RestoreCommand(outlines)):
            try:
                self._local.restore(collective.Shared(outlines, state))
            except StoreError as error:  # the other ranks were told, and go on
                unread.append(error)
        if unread:
            raise unread[0]

    def _restore_parts(self, state: DividedState) -> None:
        """Have each rank read the elements that it is to have."""
        unread: list[tuple[str, bool]] = []  # reasons, and whether each is damage
        with self._crew.watched():
            self._crew.send_all(RestorePart(state.place))
            try:
                self._local.restore(state)
            except StoreError as error:  # the other ranks read on
                unread.append((str(error), isinstance(error, Damaged)))
            unread += [(reply.unread, reply.damaged) for reply in self._crew.replies() if reply.unread]
        if unread:  # an older checkpoint stands in for a damaged one, and for no other
            reason, damaged = min(unread, key=lambda one: one[1])
            raise (Damaged if damaged else StoreError)(reason)

    def rest(self) -> None:
        with self._together(RestCommand()):
            self._local.rest()

    def close(self) -> None:
        """End the other ranks, and this rank's learner."""
        ending = threading.Thread(target=self._crew.close, name="end of ranks")
        ending.start()  # all leave the process group together: a rank that leaves may wait for the others
        try:
            self._local.close()
        finally:
            collective.leave()
            ending.join()

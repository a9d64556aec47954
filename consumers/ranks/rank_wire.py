"""Messages between rank 0 and the other ranks, each a frame of msgpack and raw arrays, never pickle."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np
import torch

from consumers.batches.micro_batches import MicroBatch
from consumers.batches.packing import pack_sequences
from consumers.batches.training_rows import Scores
from consumers.learners.collective import Outline
from consumers.learners.snapshot import PartPlace
from consumers.losses.loss import Needs
from consumers.losses.objective import LossStats
from schemas.wire import Float32s, Int8s, Int32s, Message, decode, encode

_OPTIONAL = ("reference", "before", "values", "returns")


class Setup(msgspec.Struct, tag=True):
    """The first frame: tells a rank its number, run, model and settings."""

    run: str
    model: str  # its folder on rank 0's machine
    spec: str  # JSON
    number: int
    ranks: int
    local: int  # number among the ranks of its machine
    host: str  # of the store where ranks find rank 0
    port: int


class Working(msgspec.Struct, tag=True):
    """Now and then from a rank of another machine: the processor seconds that it has used."""

    used_s: float


class Accumulate(msgspec.Struct, tag=True):
    """Add the gradients of micro-batches."""

    batches: list[bytes]
    rounds: int  # micro-batches to compute at least; fillers make up the number


class ScoreCommand(msgspec.Struct, tag=True):
    """Score micro-batches, as `needs` says."""

    batches: list[bytes]
    needs: Needs
    rounds: int


class StepCommand(msgspec.Struct, tag=True):
    """Take an optimizer step."""

    total: float


class BeginIteration(msgspec.Struct, tag=True):
    """Remember the current weights as those that an iteration begins with."""


class RestCommand(msgspec.Struct, tag=True):
    """Give back memory that is not in use."""


class Weights(msgspec.Struct, tag=True):
    """Take part in gathering weights on rank 0."""


class StateCommand(msgspec.Struct, tag=True):
    """Take part in gathering the state on rank 0."""


class SnapshotCommand(msgspec.Struct, tag=True):
    """Write your part of the state at a place while training goes on; without one, only take a snapshot."""

    place: PartPlace | None


class Adopt(msgspec.Struct, tag=True):
    """Replace the weights by rank 0's."""

    outlines: list[Outline]


class RestoreCommand(msgspec.Struct, tag=True):
    """Restore rank 0's state."""

    outlines: list[Outline]


class RestorePart(msgspec.Struct, tag=True):
    """Restore your part of the state that is stored at a place."""

    place: PartPlace


Command = (
    Accumulate
    | ScoreCommand
    | StepCommand
    | BeginIteration
    | RestCommand
    | Weights
    | StateCommand
    | SnapshotCommand
    | Adopt
    | RestoreCommand
    | RestorePart
)


class CommandDone(msgspec.Struct, tag=True):
    """The reply of a rank that has carried out a command, or is ready."""

    stats: list[LossStats] = []
    scores: list[bytes] = []
    unread: str = ""  # why a part of a state could not be read
    damaged: bool = False  # whether that is because it is damaged
    weights: int = 0  # digest after a step; 0 if the learner takes none
    machine: str = ""  # the kind of machine, of a rank that is ready


class Failed(msgspec.Struct, tag=True):
    """The reply of a rank that failed to carry out a command, and ends."""

    reason: str
    batch: int = -1  # index in the command of the micro-batch that is not finite; -1: none


Reply = CommandDone | Failed
FarReply = Reply | Working


class _Batch(Message, frozen=True, kw_only=True):
    """A micro-batch, without its rows."""

    KIND: ClassVar[str] = "microbatch"
    known: list[str]  # names of the optional parts that are there
    sizes: Int32s  # tokens of each row
    lengths: Int32s  # drawn tokens of each row
    tokens: Int32s
    behaviour: Float32s
    advantage: Float32s
    weight: Float32s
    fresh: Int8s
    reference: Float32s
    before: Float32s
    values: Float32s
    returns: Float32s
    routes: list[bytes]  # of each row


def batch_to_bytes(batch: MicroBatch) -> bytes:
    """Encode a micro-batch without its rows."""
    optional = {name: getattr(batch, name) for name in _OPTIONAL}
    arrays = {name: np.zeros(0) if value is None else value.numpy() for name, value in optional.items()}
    return encode(
        _Batch(
            known=[name for name, value in optional.items() if value is not None],
            sizes=np.array([row.size for row in batch.rows]),
            lengths=np.array([row.sample.tokens.size for row in batch.rows]),
            tokens=batch.tokens[: batch.packing.tokens].numpy(),
            behaviour=batch.behaviour.numpy(), advantage=batch.advantage.numpy(),
            weight=batch.weight.numpy(), fresh=batch.fresh.numpy(), routes=list(batch.routes), **arrays,
        )
    )  # fmt: skip


def batch_from_bytes(raw: bytes) -> MicroBatch:
    """Decode a micro-batch, equal to the bit; its `rows` are empty."""
    said = decode(raw, _Batch)
    packing = pack_sequences(said.sizes.tolist())
    tokens = np.zeros(packing.positions.shape[0], dtype=np.int64)
    tokens[: packing.tokens] = said.tokens
    lengths, ends = said.lengths, np.cumsum(said.sizes)
    answer = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return MicroBatch(
        rows=(),
        packing=packing,
        tokens=torch.from_numpy(tokens),
        answer=torch.from_numpy(np.concatenate(answer)),
        owner=torch.from_numpy(np.repeat(np.arange(lengths.size), lengths)),
        behaviour=_tensor(said.behaviour),
        advantage=_tensor(said.advantage),
        weight=_tensor(said.weight),
        fresh=_tensor(said.fresh.astype(bool)),
        routes=said.routes,
        **{name: _tensor(getattr(said, name)) if name in said.known else None for name in _OPTIONAL},
    )


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy())  # received arrays are read-only, and torch wants to write


class _Scores(Message, frozen=True, kw_only=True):
    """Scores of a micro-batch."""

    KIND: ClassVar[str] = "scores"
    known: list[str]
    reference: Float32s
    before: Float32s
    values: Float32s


def scores_to_bytes(scores: Scores) -> bytes:
    """Encode the scores of a micro-batch."""
    parts: dict[str, np.ndarray | None] = {
        name: getattr(scores, name) for name in ("reference", "before", "values")
    }
    known = [name for name, part in parts.items() if part is not None]
    arrays = {name: np.zeros(0) if part is None else part for name, part in parts.items()}
    return encode(_Scores(known=known, **arrays))


def scores_from_bytes(raw: bytes) -> Scores:
    """Decode scores, equal to the bit."""
    said = decode(raw, _Scores)
    return Scores(**{name: getattr(said, name) for name in said.known})

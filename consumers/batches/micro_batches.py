"""Turn rows into micro-batches: compute advantages, sort the samples by length, cut.

The result depends on the rows alone, not on their order or on which sample finished first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import torch

from consumers.batches.cutting import cut
from consumers.batches.packing import Packing, pack_sequences
from consumers.batches.training_rows import TrainingRow
from infra.sending import sent
from schemas.losses import SAMPLES, LossSection
from schemas.messages import Sample

_START_COST = 180  # starting another micro-batch takes about as long as so many tokens


class LossOfRows(Protocol):
    """The half of a loss that works on rows, before any gradient is computed: see `consumers.losses.loss`."""

    critic: bool

    @property
    def settings(self) -> LossSection:
        """The loss's section of the run file."""

    @property
    def trains_all(self) -> bool:
        """Whether samples without an advantage have a gradient too."""

    def advantages(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Return for each row one advantage for all its tokens, or one per token. Groups must be whole."""

    def returns(self, row: TrainingRow, advantage: np.ndarray) -> np.ndarray:
        """Return the value that the critic should have predicted for each token."""

    def weight(self, length: int) -> float:
        """Return the weight of each token of an answer that has `length` tokens."""

    def left_out(self, samples: Sequence[Sample]) -> set[int]:
        """Return the groups that neither have a gradient nor count in the average."""


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal work out, the costliest first, each to the rank that has least. Return indexes by rank."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        rank = loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += costs[number]
    return shares


@dataclass(frozen=True)
class MicroBatch:
    """Samples end to end, each answer right behind its prompt. Tensors have one entry per drawn token."""

    rows: Sequence[TrainingRow]
    packing: Packing
    tokens: torch.Tensor  # [tokens, then filling]; not per drawn token
    answer: torch.Tensor  # positions of the drawn tokens in `tokens`
    owner: torch.Tensor  # index of each token's row
    behaviour: torch.Tensor  # logprobs under the weights that drew the tokens
    advantage: torch.Tensor
    weight: torch.Tensor
    fresh: torch.Tensor  # bool: the whole sample was drawn by the version of `version_trained`
    reference: torch.Tensor | None  # this and the next three: None if not known, see Scores
    before: torch.Tensor | None
    values: torch.Tensor | None
    returns: torch.Tensor | None
    routes: Sequence[bytes] = ()  # of each row, as its sample has them; the trainer unpacks them at last

    @property
    def cost(self) -> float:
        """Estimated time that it takes, as a number of tokens."""
        return self.packing.tokens + _START_COST

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch with its tensors on a device."""
        moved = {
            field.name: sent(value, device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, packing=self.packing.to(device), **moved)


def micro_batch(
    rows: Sequence[TrainingRow], advantages: Sequence[np.ndarray] | None, loss: LossOfRows, version: int
) -> MicroBatch:
    """Turn rows into tensors. Without advantages the micro-batch can only be scored."""
    samples = [row.sample for row in rows]
    packing = pack_sequences([row.size for row in rows])
    tokens = np.zeros(packing.positions.shape[0], dtype=np.int64)
    parts = [part for sample in samples for part in (sample.prompt_tokens, sample.tokens)]
    tokens[: packing.tokens] = np.concatenate(parts)
    drawn = np.repeat([False, True] * len(rows), [part.size for part in parts])
    lengths = [sample.tokens.size for sample in samples]
    given = [np.zeros(1)] * len(rows) if advantages is None else advantages
    each = [np.broadcast_to(one, length) for one, length in zip(given, lengths, strict=True)]
    returns = None
    if loss.critic and advantages is not None:
        returns = _floats([loss.returns(row, one) for row, one in zip(rows, each, strict=True)])
    return MicroBatch(
        rows=rows,
        packing=packing,
        tokens=torch.from_numpy(tokens),
        answer=torch.from_numpy(np.flatnonzero(drawn)),
        owner=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
        behaviour=torch.from_numpy(np.concatenate([sample.logprobs for sample in samples])),
        advantage=_floats(each),
        weight=torch.from_numpy(
            np.repeat(np.array([loss.weight(length) for length in lengths], dtype=np.float32), lengths)
        ),
        fresh=torch.from_numpy(np.repeat([bool((s.versions == version).all()) for s in samples], lengths)),
        reference=_if_known([_reference(row, loss) for row in rows]),
        before=_if_known([row.scores.before for row in rows]),
        values=_if_known([row.scores.values for row in rows]),
        returns=returns,
        routes=[sample.routes for sample in samples],
    )


def _reference(row: TrainingRow, loss: LossOfRows) -> np.ndarray | None:
    return row.sample.logprobs if loss.settings.reference == SAMPLES else row.scores.reference


def filler() -> MicroBatch:
    """Return a micro-batch of one drawn token with weight 0, for a rank without work."""
    packing, nothing, first = pack_sequences([2]), torch.zeros(1), torch.zeros(1, dtype=torch.long)
    return MicroBatch(
        rows=(), packing=packing, tokens=torch.zeros_like(packing.positions), answer=first + 1, owner=first,
        behaviour=nothing, advantage=nothing, weight=nothing, fresh=first.bool(), reference=None, before=None,
        values=None, returns=None,
    )  # fmt: skip


def with_fillers(batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """Append fillers until there are at least `count` micro-batches."""
    return [*batches, *(filler() for _ in range(count - len(batches)))]


def _floats(parts: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))


def _if_known(parts: Sequence[np.ndarray | None]) -> torch.Tensor | None:
    known = [part for part in parts if part is not None]
    return _floats(known) if len(known) == len(parts) else None


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batches of some rows, and the rows that are in none of them."""

    batches: list[MicroBatch]
    idle: list[TrainingRow]  # no gradient, so they are not computed; the loss's total may still count them


def _trained(rows: Sequence[TrainingRow], advantages: Sequence[np.ndarray], loss: LossOfRows) -> list[bool]:
    """Return for each row whether it has a gradient."""
    left_out = loss.left_out([row.sample for row in rows])
    return [
        not row.sample.reward_error
        and row.sample.group not in left_out
        and (loss.trains_all or bool(np.any(advantage)))
        for row, advantage in zip(rows, advantages, strict=True)
    ]


def plan(
    rows: Sequence[TrainingRow], loss: LossOfRows, budget: int, version: int, *, parts: int = 1,
    sizes: Sequence[int] = (),
) -> MicroBatchPlan:  # fmt: skip
    """Compute advantages, and cut the rows that have a gradient into micro-batches of similar length.

    `budget`: maximum tokens in a micro-batch. `version`: see `version_trained`. `parts`: the number of
    micro-batches is a multiple of it, if there are enough samples. `sizes`: of micro-batches to cut into,
    instead of a new cut, if together they have as many samples as have a gradient.
    """
    worth = loss.advantages(rows)
    trained = _trained(rows, worth, loss)
    chosen = [number for number in range(len(rows)) if trained[number]]
    chosen.sort(key=lambda number: (rows[number].size, rows[number].sample.group, rows[number].sample.index))
    batches: list[MicroBatch] = []
    start = 0
    if sum(sizes) != len(chosen):
        sizes = cut([rows[number].size for number in chosen], budget, parts)
    for size in sizes:
        members = chosen[start : start + size]
        batches.append(micro_batch([rows[n] for n in members], [worth[n] for n in members], loss, version))
        start += size
    return MicroBatchPlan(batches, [rows[number] for number in range(len(rows)) if not trained[number]])


def planned_as(
    rows: Sequence[TrainingRow], sizes: Sequence[int], loss: LossOfRows, version: int
) -> list[list[MicroBatch]]:
    """Rebuild the micro-batches that a recorded step was trained in; return them plan by plan.

    `rows` are in the ledger's order; `sizes` are those of the micro-batches in the step's record.
    """
    worth = loss.advantages(rows)
    trained = _trained(rows, worth, loss)
    ends = list(itertools.accumulate(sizes))
    plans: list[list[MicroBatch]] = [[]]
    for size, end in zip(sizes, ends, strict=True):
        if size and trained[end - 1]:
            plans[-1].append(micro_batch(rows[end - size : end], worth[end - size : end], loss, version))
        else:
            plans.append([])  # the idle rows end a plan
    return [batches for batches in plans if batches]

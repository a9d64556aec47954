"""From rows to micro-batches: advantages, then cuts of samples sorted by length.

Everything here is a function of the rows alone, whatever their order: never of who finished first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import torch

from consumers.batches.packing import Packing, pack_sequences
from consumers.batches.training_rows import TrainingRow
from schemas.losses import SAMPLES, LossSection
from schemas.messages import Sample

_START_COST = 180  # starting another micro-batch costs about as much as so many tokens


class LossOfRows(Protocol):
    """The part of a loss that is known before anything is computed: see `consumers.losses.loss`."""

    settings: LossSection
    critic: bool

    @property
    def trains_all(self) -> bool:
        """Whether samples without an advantage have a gradient too."""

    def advantages(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Of each row one for all its tokens, or one a token. None of a group may be missing."""

    def returns(self, row: TrainingRow, advantage: np.ndarray) -> np.ndarray:
        """The values that the critic should have given each token."""

    def weight(self, length: int) -> float:
        """Of each token of a sample of some length."""

    def left_out(self, samples: Sequence[Sample]) -> set[int]:
        """Groups that neither have a gradient nor count in the average."""


def cut(lengths: Sequence[int], budget: int, parts: int) -> list[int]:
    """Sizes of the micro-batches that sorted rows are cut into.

    As few as hold `budget` tokens each, or some more, so that `parts` ranks have equally many; then the
    largest as small as can be.
    """
    if not lengths:
        return []
    count = -(-len(_filled(lengths, budget)) // parts) * parts
    least, most = max(lengths[-1], -(-sum(lengths) // count)), budget
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if len(_filled(lengths, middle)) <= count else (middle + 1, most)
    return _filled(lengths, most)


def _filled(lengths: Sequence[int], most: int) -> list[int]:
    """Sizes of micro-batches that are filled one after the other."""
    sizes = [0]
    held = 0
    for length in lengths:
        if sizes[-1] and held + length > most:
            sizes.append(0)
            held = 0
        sizes[-1] += 1
        held += length
    return sizes


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which rank does what: the costliest first, each to the rank that has least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        rank = loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += costs[number]
    return shares


@dataclass(frozen=True)
class MicroBatch:
    """Samples end to end, answers right behind their prompts. Of drawn tokens: one entry each."""

    rows: Sequence[TrainingRow]
    packing: Packing
    tokens: torch.Tensor  # [tokens, and what fills up]
    answer: torch.Tensor  # where drawn tokens stand in `tokens`
    owner: torch.Tensor  # which row each is of
    behaviour: torch.Tensor  # logprobs under the weights that drew them
    advantage: torch.Tensor
    weight: torch.Tensor
    fresh: torch.Tensor  # bool: of samples that weights at hand alone have made, see `version_trained`
    reference: torch.Tensor | None  # and what else the loss needs, see Scores
    before: torch.Tensor | None
    values: torch.Tensor | None
    returns: torch.Tensor | None

    @property
    def cost(self) -> float:
        """How long it takes, in tokens."""
        return self.packing.tokens + _START_COST

    def to(self, device: torch.device) -> MicroBatch:
        """On a device."""
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, packing=self.packing.to(device), **moved)


def micro_batch(
    rows: Sequence[TrainingRow], advantages: Sequence[np.ndarray] | None, loss: LossOfRows, version: int
) -> MicroBatch:
    """Rows as tensors; without advantages, to be scored."""
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
    )


def _reference(row: TrainingRow, loss: LossOfRows) -> np.ndarray | None:
    return row.sample.logprobs if loss.settings.reference == SAMPLES else row.scores.reference


def filler() -> MicroBatch:
    """One token that counts nothing: for a rank without work."""
    packing, nothing, first = pack_sequences([2]), torch.zeros(1), torch.zeros(1, dtype=torch.long)
    return MicroBatch(
        rows=(), packing=packing, tokens=torch.zeros_like(packing.positions), answer=first + 1, owner=first,
        behaviour=nothing, advantage=nothing, weight=nothing, fresh=first.bool(), reference=None, before=None,
        values=None, returns=None,
    )  # fmt: skip


def with_fillers(batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """At least so many micro-batches."""
    return [*batches, *(filler() for _ in range(count - len(batches)))]


def _floats(parts: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))


def _if_known(parts: Sequence[np.ndarray | None]) -> torch.Tensor | None:
    known = [part for part in parts if part is not None]
    return _floats(known) if len(known) == len(parts) else None


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batches of some rows, and the rows that are trained by none of them."""

    batches: list[MicroBatch]
    idle: list[TrainingRow]  # no advantage, no gradient: they count in the average and cost nothing


def _trained(rows: Sequence[TrainingRow], advantages: Sequence[np.ndarray], loss: LossOfRows) -> list[bool]:
    """Which rows have a gradient."""
    left_out = loss.left_out([row.sample for row in rows])
    return [
        not row.sample.reward_error
        and row.sample.group not in left_out
        and (loss.trains_all or bool(np.any(advantage)))
        for row, advantage in zip(rows, advantages, strict=True)
    ]


def plan(
    rows: Sequence[TrainingRow], loss: LossOfRows, budget: int, version: int, *, parts: int = 1
) -> MicroBatchPlan:
    """Advantages, then micro-batches of like length: work for `parts` ranks, if there are so many samples."""
    worth = loss.advantages(rows)
    trained = _trained(rows, worth, loss)
    chosen = [number for number in range(len(rows)) if trained[number]]
    chosen.sort(key=lambda number: (rows[number].size, rows[number].sample.group, rows[number].sample.index))
    batches: list[MicroBatch] = []
    start = 0
    for size in cut([rows[number].size for number in chosen], budget, parts):
        members = chosen[start : start + size]
        batches.append(micro_batch([rows[n] for n in members], [worth[n] for n in members], loss, version))
        start += size
    return MicroBatchPlan(batches, [rows[number] for number in range(len(rows)) if not trained[number]])


def planned_as(
    rows: Sequence[TrainingRow], sizes: Sequence[int], loss: LossOfRows, version: int
) -> list[list[MicroBatch]]:
    """The micro-batches that rows were trained in, by the ledger's order and sizes; plan by plan."""
    worth = loss.advantages(rows)
    trained = _trained(rows, worth, loss)
    ends = list(itertools.accumulate(sizes))
    plans: list[list[MicroBatch]] = [[]]
    for size, end in zip(sizes, ends, strict=True):
        if size and trained[end - 1]:
            plans[-1].append(micro_batch(rows[end - size : end], worth[end - size : end], loss, version))
        else:
            plans.append([])  # the idle rows are a plan's last ones
    return [batches for batches in plans if batches]

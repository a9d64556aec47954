"""From rows to micro-batches: advantages, then cuts by length that waste little on padding.

Everything here is a function of the rows alone, whatever their order: never of who finished first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from consumers.losses.base import Loss
from consumers.packing import Packing, pack
from consumers.rows import Row
from schemas.losses import SAMPLES

_START_COST = 150  # starting another micro-batch costs about as much as so many tokens
_PADDING_COST = 0.3  # only attention computes padding, see packing.py
_SLACKS = (1.0, 1.05, 1.2)  # by how much a micro-batch may be larger than a rank's fair part


def cost(tokens: int, padded: int) -> float:
    """Of a micro-batch of so many tokens, without and with padding."""
    return tokens + _PADDING_COST * (padded - tokens) + _START_COST


def cut(lengths: Sequence[int], budget: int) -> list[int]:
    """Sizes of the micro-batches that sorted rows (shortest first) are cut into, at least cost.

    No micro-batch has more than `budget` tokens with padding. Dynamic programming over the cuts.
    """
    best = [0.0]
    last_size = [0]
    ends = [0, *itertools.accumulate(lengths)]
    for end in range(1, len(lengths) + 1):
        longest = lengths[end - 1]
        options = [
            (best[end - size] + cost(ends[end] - ends[end - size], size * longest), size)
            for size in range(1, min(end, max(1, budget // longest)) + 1)
        ]
        least, size = min(options)
        best.append(least)
        last_size.append(size)
    sizes: list[int] = []
    end = len(lengths)
    while end:
        sizes.append(last_size[end])
        end -= last_size[end]
    return sizes[::-1]


def cut_for(lengths: Sequence[int], budget: int, parts: int) -> list[int]:
    """As `cut`, so that `parts` ranks that share the micro-batches are done soonest."""
    whole = sum(lengths)
    if parts == 1 or not lengths or whole > 4 * parts * budget:
        return cut(lengths, budget)  # there are many anyway
    fair = max(lengths[-1], -(-whole // parts))
    options = [cut(lengths, min(budget, int(fair * slack))) for slack in _SLACKS]

    def longest(sizes: Sequence[int]) -> float:
        costs = _costs(lengths, sizes)
        return max(sum(costs[number] for number in share) for share in deal(costs, parts))

    return min(options, key=lambda sizes: (longest(sizes), len(sizes)))


def _costs(lengths: Sequence[int], sizes: Sequence[int]) -> list[float]:
    ends = list(itertools.accumulate(sizes))
    return [
        cost(sum(lengths[end - size : end]), size * lengths[end - 1])
        for size, end in zip(sizes, ends, strict=True)
    ]


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

    rows: Sequence[Row]
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
    def padded_tokens(self) -> int:
        """Tokens that attention computes."""
        return self.packing.sequences * self.packing.longest

    @property
    def cost(self) -> float:
        """How long it takes, in tokens."""
        return cost(self.packing.tokens, self.padded_tokens)

    def to(self, device: torch.device) -> MicroBatch:
        """On a device."""
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, packing=self.packing.to(device), **moved)


def micro_batch(
    rows: Sequence[Row], advantages: Sequence[np.ndarray] | None, loss: Loss, version: int
) -> MicroBatch:
    """Rows as tensors; without advantages, to be scored."""
    samples = [row.sample for row in rows]
    packing = pack([row.size for row in rows])
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


def _reference(row: Row, loss: Loss) -> np.ndarray | None:
    return row.sample.logprobs if loss.settings.reference == SAMPLES else row.scores.reference


def filler() -> MicroBatch:
    """One token that counts nothing: for a rank without work."""
    packing, nothing, first = pack([2]), torch.zeros(1), torch.zeros(1, dtype=torch.long)
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
class Plan:
    """The micro-batches of some rows, and the rows that are trained by none of them."""

    batches: list[MicroBatch]
    idle: list[Row]  # no advantage, no gradient: they count in the average and cost nothing


def _trained(rows: Sequence[Row], advantages: Sequence[np.ndarray], loss: Loss) -> list[bool]:
    """Which rows have a gradient."""
    left_out = loss.left_out([row.sample for row in rows])
    return [
        not row.sample.reward_error
        and row.sample.group not in left_out
        and (loss.trains_all or bool(np.any(advantage)))
        for row, advantage in zip(rows, advantages, strict=True)
    ]


def plan(rows: Sequence[Row], loss: Loss, budget: int, version: int, *, parts: int = 1) -> Plan:
    """Advantages, then micro-batches of like length: work for `parts` ranks, if there are so many samples."""
    worth = loss.advantages(rows)
    trained = _trained(rows, worth, loss)
    chosen = [number for number in range(len(rows)) if trained[number]]
    chosen.sort(key=lambda number: (rows[number].size, rows[number].sample.group, rows[number].sample.index))
    batches: list[MicroBatch] = []
    start = 0
    for size in cut_for([rows[number].size for number in chosen], budget, parts):
        members = chosen[start : start + size]
        batches.append(micro_batch([rows[n] for n in members], [worth[n] for n in members], loss, version))
        start += size
    return Plan(batches, [rows[number] for number in range(len(rows)) if not trained[number]])


def planned_as(rows: Sequence[Row], sizes: Sequence[int], loss: Loss, version: int) -> list[list[MicroBatch]]:
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

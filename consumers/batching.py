"""From rows to micro-batches: advantages by group, then cuts by length that waste little on padding.

Everything here is a function of the rows alone, whatever their order: never of who finished first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from consumers.packing import Packing, pack
from consumers.stream import Row
from schemas.messages import Sample
from schemas.runspec import AlgorithmSection

_START_COST = 150  # starting another micro-batch costs about as much as so many tokens
_PADDING_COST = 0.3  # only attention computes padding, see packing.py


def advantages(samples: Sequence[Sample], algorithm: AlgorithmSection) -> np.ndarray:
    """Advantage of each sample over its group; 0 for one without a reward, which doesn't touch the others."""
    rewards = np.array([np.nan if sample.reward_error else sample.reward for sample in samples])
    groups = np.array([sample.group for sample in samples])
    by_index = np.argsort([sample.index for sample in samples])  # a mean's bits depend on the order
    result = np.zeros(len(samples))
    for group in np.unique(groups):
        members = by_index[(groups == group)[by_index]]
        members = members[~np.isnan(rewards[members])]
        if members.size < 2:
            continue  # no baseline
        centred = rewards[members] - rewards[members].mean()
        if not np.any(np.abs(centred) > 1e-9):
            continue  # all alike: nothing to learn, and no rounding error to learn from
        if algorithm.advantage == "std":
            centred = centred / (rewards[members].std() + 1e-6)
        result[members] = centred
    return result


def token_weight(length: int, algorithm: AlgorithmSection) -> float:
    """Weight of each token of a sample of some length."""
    return {"token": 1.0, "sqrt": length**-0.5, "sequence": 1.0 / length}[algorithm.length_weight]


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
            for size in range(1, end + 1)
            if size == 1 or size * longest <= budget
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


@dataclass(frozen=True)
class MicroBatch:
    """Samples end to end, answers right behind their prompts."""

    rows: Sequence[Row]
    packing: Packing
    tokens: torch.Tensor  # [tokens, and what fills up]
    answer: torch.Tensor  # [drawn tokens] where they stand in `tokens`
    behaviour: torch.Tensor  # [drawn tokens] logprobs under the weights that drew them
    advantage: torch.Tensor  # [drawn tokens]
    weight: torch.Tensor  # [drawn tokens]
    on_policy: torch.Tensor  # bool [drawn tokens], of samples made by `version` alone

    @property
    def padded_tokens(self) -> int:
        """Tokens that attention computes."""
        return self.packing.sequences * self.packing.longest

    def to(self, device: torch.device) -> MicroBatch:
        """On a device."""
        tensors = (self.tokens, self.answer, self.behaviour, self.advantage, self.weight, self.on_policy)
        return MicroBatch(self.rows, self.packing.to(device), *(tensor.to(device) for tensor in tensors))


def micro_batch(
    rows: Sequence[Row], advantage: Sequence[float] | np.ndarray, algorithm: AlgorithmSection, version: int
) -> MicroBatch:
    """Rows as tensors."""
    samples = [row.sample for row in rows]
    packing = pack([_size(row) for row in rows])
    tokens = np.zeros(packing.positions.shape[0], dtype=np.int64)
    parts = [part for sample in samples for part in (sample.prompt_tokens, sample.tokens)]
    tokens[: packing.tokens] = np.concatenate(parts)
    drawn = np.repeat([False, True] * len(rows), [part.size for part in parts])
    lengths = [sample.tokens.size for sample in samples]
    weights = [token_weight(length, algorithm) for length in lengths]
    exact = [bool((sample.versions == version).all()) for sample in samples]
    return MicroBatch(
        rows=rows,
        packing=packing,
        tokens=torch.from_numpy(tokens),
        answer=torch.from_numpy(np.flatnonzero(drawn)),
        behaviour=torch.from_numpy(np.concatenate([sample.logprobs for sample in samples])),
        advantage=torch.from_numpy(np.repeat(np.array(advantage, dtype=np.float32), lengths)),
        weight=torch.from_numpy(np.repeat(np.array(weights, dtype=np.float32), lengths)),
        on_policy=torch.from_numpy(np.repeat(np.array(exact), lengths)),
    )


@dataclass(frozen=True)
class Plan:
    """The micro-batches of some rows, and the rows that are trained by none of them."""

    batches: list[MicroBatch]
    idle: list[Row]  # no advantage, no gradient: they count in the average and cost nothing


def plan(rows: Sequence[Row], algorithm: AlgorithmSection, budget: int, version: int) -> Plan:
    """Advantages, then micro-batches of like length."""
    worth = advantages([row.sample for row in rows], algorithm)
    chosen = [number for number in range(len(rows)) if worth[number]]
    chosen.sort(
        key=lambda number: (_size(rows[number]), rows[number].sample.group, rows[number].sample.index)
    )
    batches: list[MicroBatch] = []
    start = 0
    for size in cut([_size(rows[number]) for number in chosen], budget):
        members = chosen[start : start + size]
        batches.append(
            micro_batch([rows[n] for n in members], [worth[n] for n in members], algorithm, version)
        )
        start += size
    return Plan(batches, [rows[number] for number in range(len(rows)) if not worth[number]])


def planned_as(
    rows: Sequence[Row], sizes: Sequence[int], algorithm: AlgorithmSection, version: int
) -> list[MicroBatch]:
    """The micro-batches that rows were trained in, by the ledger's order and sizes."""
    worth = advantages([row.sample for row in rows], algorithm)
    ends = list(itertools.accumulate(sizes))
    return [
        micro_batch(rows[end - size : end], worth[end - size : end], algorithm, version)
        for size, end in zip(sizes, ends, strict=True)
        if worth[end - size : end].any()
    ]


def _size(row: Row) -> int:
    return int(row.sample.prompt_tokens.size + row.sample.tokens.size)

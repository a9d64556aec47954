"""Norm and digest of a vector that several ranks share: the same however it is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumers.learners import collective, sharded_fingerprint
from consumers.learners.fingerprint import Fingerprint
from consumers.learners.sharded_fingerprint import ShardedFingerprint
from consumers.learners.sharded_model import Shard
from consumers.learners.sharded_norm import norm_of_pieces

CPU = torch.device("cpu")


def drawn(size: int, seed: int) -> torch.Tensor:
    """Numbers of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=draw) * 10 ** (4 * torch.randn(size, generator=draw))


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.integers(0, 99))
def test_a_norm_has_the_same_bits_however_it_is_cut(sizes: list[int], seed: int) -> None:
    whole = drawn(sum(sizes), seed)
    pieces = whole[torch.randperm(whole.numel(), generator=torch.Generator().manual_seed(seed))].split(sizes)
    norm = norm_of_pieces(lambda: [whole], max(1, whole.numel()), CPU)
    assert norm == norm_of_pieces(lambda: pieces, max(1, whole.numel()), CPU)
    assert norm == pytest.approx(math.sqrt(math.fsum(whole.double().square().tolist())), rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_of_what_is_no_number_is_infinite(bad: float) -> None:
    assert norm_of_pieces(lambda: [torch.tensor([1.0]), torch.tensor([bad, 2.0])], 3, CPU) == math.inf


def print_of(tensors: list[torch.Tensor], ranks: int, monkeypatch: pytest.MonkeyPatch) -> Fingerprint:
    """The fingerprint that so many ranks find; here one after the other, with what they add up."""
    sums: list[list[torch.Tensor]] = []
    monkeypatch.setattr(collective, "ranks", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(collective, "rank_number", lambda rank=rank: rank)
        mine: list[torch.Tensor] = []
        monkeypatch.setattr(collective, "add_up", lambda one, mine=mine: mine.append(one.clone()))
        taking = ShardedFingerprint(CPU)
        for tensor in tensors:
            shard = shard_of(tensor, ranks, rank)
            rows = shard.rows_in({"w": tensor}, "w")
            assert rows is not None
            taking.add(rows, shard)
        taking.found()
        sums.append(mine)
    totals = [sum(each) for each in zip(*sums, strict=True)]
    monkeypatch.setattr(collective, "add_up", lambda one: one.copy_(totals.pop(0)))
    return taking.found()


def shard_of(tensor: torch.Tensor, ranks: int, rank: int) -> Shard:
    class Divided:
        most = -(-tensor.shape[0] // ranks)
        _local_tensor = tensor[min(most * rank, tensor.shape[0]) :][:most]

    return Shard(tuple(tensor.shape), Divided(), 0)


@pytest.mark.parametrize("elements", [False, True], ids=["CPU", "as on a GPU"])
def test_a_digest_does_not_depend_on_the_ranks(monkeypatch: pytest.MonkeyPatch, elements: bool) -> None:
    if elements:
        of_elements: Any = sharded_fingerprint._of_elements
        monkeypatch.setattr(
            sharded_fingerprint, "_of_rows", lambda flat, width, begin: of_elements(flat, begin)
        )
    tensors = [drawn(70, 1).view(7, 10), drawn(5, 2), drawn(24, 3).view(2, 3, 4), drawn(1, 4)]
    with monkeypatch.context() as patch:
        expected = print_of(tensors, 1, patch)
    whole = torch.cat([one.flatten() for one in tensors])
    assert expected.count == whole.numel()
    assert expected.size == pytest.approx(float(whole.double().norm()))
    for ranks in (2, 3, 4, 9):
        with monkeypatch.context() as patch:
            found = print_of(tensors, ranks, patch)
        assert found.digest == expected.digest
        assert found.sketch == pytest.approx(expected.sketch)
    for change in (tensors[::-1], [tensors[0].roll(1, 0), *tensors[1:]], [tensors[0] * 2, *tensors[1:]]):
        with monkeypatch.context() as patch:
            assert print_of(change, 1, patch).digest != expected.digest

"""The group of ranks: sums that all have in the same bits, and slices that vLLM must hold as expected."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from infra.weights.folder import ModelFolder
from infra.weights.slices import Slicing
from producers.engines.engine import EngineError, Pace
from producers.engines.held_slices import part_of
from producers.engines.rank_group import EngineRank, add_in_order, new_group_name
from producers.engines.rank_meeting import LocalMeeting
from producers.engines.shared_plan import SharedPlan
from schemas.rank_layout import RankLayout
from tests.factories import make_spec, make_tiny_mixture, make_tiny_model


@dataclass
class Gathering:
    """The communicator of one of some ranks; they all have their values ready."""

    values: list[torch.Tensor]

    def all_gather(self, mine: torch.Tensor, axis: int) -> torch.Tensor:
        assert axis == 0 and mine.shape[0] == 1
        return torch.cat([one.reshape(1, -1) for one in self.values])


def values(dtype: torch.dtype, rows: int, ranks: int = 5) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(3)
    return [torch.randn(64, 7, generator=noise).to(dtype)[:rows] for _ in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_have_the_same_sum_for_any_number_of_rows(dtype: torch.dtype) -> None:
    whole = values(dtype, 64)
    sums = [add_in_order(Gathering(whole), one.clone()) for one in whole]
    assert all(torch.equal(one, sums[0]) for one in sums)
    expected = torch.zeros(64, 7)
    for one in whole:
        expected += one.float()  # in 16 bits it is rounded once
    assert torch.equal(sums[0], expected.to(dtype))
    few = values(dtype, 3)
    assert torch.equal(add_in_order(Gathering(few), few[2].clone()), sums[0][:3])


def test_a_sum_takes_the_place_of_what_was_added() -> None:
    mine = torch.ones(2, 3)
    assert add_in_order(Gathering([torch.ones(2, 3)] * 3), mine) is mine
    assert torch.equal(mine, torch.full((2, 3), 3.0))


class Held:
    """What an engine of one rank would hold after loading."""

    def __init__(self, folder: ModelFolder, slicing: Slicing, rank: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.voided: list[str] = []
        for name, shape in folder.shapes.items():
            mine, whole = slicing.slice(name, shape, rank), folder.tensor(name)
            self.tensors[name] = (whole if mine is None else part_of(whole, mine)).clone()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def has_parameter(self, name: str) -> bool:
        return name in self.tensors

    def void(self, name: str) -> None:
        self.voided.append(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def rank_of(slicing: Slicing, number: int) -> EngineRank:
    return EngineRank(
        number, number, slicing, LocalMeeting("nowhere"), new_group_name(), 1.0, lambda own: own()
    )


def test_an_engine_that_divides_a_model_otherwise_is_refused(tmp_path: Path) -> None:
    folder = ModelFolder(make_tiny_model(tmp_path / "model", heads=2))
    slicing = Slicing.of(folder.path, RankLayout(2))
    for number in (0, 1):
        held = Held(folder, slicing, number)
        rank = rank_of(slicing, number)
        rank.check(cast(Any, held), folder)
        del held.tensors["model.norm.weight"]  # of a tensor that never comes nothing is expected
        rank.check(cast(Any, held), folder)
        name = "model.layers.0.mlp.down_proj.weight"
        other = Held(folder, slicing, 1 - number).tensors[name]
        for wrong in (other, torch.cat([other, other])):
            held.tensors[name] = wrong
            with pytest.raises(
                EngineError, match=rf"{name} otherwise than .* on rank {number} of 2"
            ) as refused:
                rank.check(cast(Any, held), folder)
            assert refused.value.lasting


def test_what_is_loaded_and_not_written_on_a_rank_is_made_useless(tmp_path: Path) -> None:
    folder = ModelFolder(make_tiny_mixture(tmp_path / "model", "qwen3_moe"))
    slicing = Slicing.of(folder.path, RankLayout(1, 2))
    others = [[name for name in folder.shapes if not slicing.holds(name, number)] for number in (0, 1)]
    outside = [[name for name in names if ".layers." not in name] for names in others]
    assert outside == [["lm_head.weight", "model.norm.weight"], ["model.embed_tokens.weight"]]
    for number in (0, 1):
        held = Held(folder, slicing, number)
        for name in set(others[number]) - set(outside[number]):
            del held.tensors[name]
        rank_of(slicing, number).check(cast(Any, held), folder)
        assert held.voided == outside[number]
    head = held.tensors.pop("lm_head.weight")  # then the embedding may be in its place
    with pytest.raises(EngineError, match=r"embed_tokens\.weight otherwise .*pipeline_parallel: 1"):
        rank_of(slicing, 1).check(cast(Any, held), folder)
    held.tensors |= {"lm_head.weight": head, "model.layers.0.input_layernorm.weight": torch.ones(64)}
    with pytest.raises(EngineError, match=r"layers\.0\.input_layernorm\.weight otherwise"):
        rank_of(slicing, 1).check(cast(Any, held), folder)


def test_no_two_groups_have_the_same_name() -> None:
    assert len({new_group_name() for _ in range(100)}) == 100


def test_the_number_of_ranks_has_bounds() -> None:
    for wrong in (0, 65, 1.5):
        with pytest.raises(ValueError, match="tensor_parallel"):
            make_spec(generator={"tensor_parallel": wrong})
    assert make_spec(generator={"tensor_parallel": 2}).generator.devices == 2
    assert make_spec().generator.devices == 1


def test_all_ranks_draft_as_rank_0_decides_by_its_clock() -> None:
    said: deque[Sequence[float]] = deque()

    def lead(own: Callable[[], Sequence[float]]) -> Sequence[float]:
        said.append(list(own()))
        return said[-1]

    leading, following = SharedPlan(lead), SharedPlan(lambda own: said.popleft())
    assert leading.attention(4) == following.attention(4) == 0
    leading.learn(Pace([1, 8, 64], [0.01, 0.01, 0.01]))  # the other one has no times at all
    for steps in range(40):
        assert leading.attention(4) == following.attention(4) == 4
        assert leading.least_chance(4) == following.least_chance(4)
        chances = [[0.5, 0.1], [0.2], [], [0.9 if steps % 3 else 0.1]]
        assert leading.lengths(4, 4, chances) == following.lengths(4, 4, chances)
        leading.drafting_took(4, 1e-4)
        leading.step_took(4, 4, 0.01)
        following.step_took(4, 4, 99.0)
    assert not said

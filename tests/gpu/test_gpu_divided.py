"""Engines whose ranks have a GPU each: slices of tensors, stretches of layers, whole experts.

Bits, moves and rests are looked at by the tests of such engines on a CPU, in bfloat16 here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from infra.weights.bits import Model, bits_of
from producers.engines.engine import DrawnAnswer, SampleRequest
from schemas.rank_layout import RankLayout
from tests.factories import make_tiny_mixture, make_tiny_model
from tests.gpu.gpu_engines import gpu_engine
from tests.integration import test_divided_engines
from tests.integration.test_divided_engines import Case, Divided, by_transformers, drawn_after_a_delta
from tests.integration.test_tensor_parallel import give, ranks_of, weights

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
    pytest.mark.timeout(600),
]
CASES = {
    "slices of tensors": Case("", RankLayout(2)),
    "stretches of layers": Case("", RankLayout(1, 2)),
    "whole experts": Case(
        "qwen3_moe", RankLayout(2, 1, True),
        config={"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 64},
    ),
}  # fmt: skip


def floats(model: Model) -> dict[str, torch.Tensor]:
    """Tensors in fp32 of weights in fp32 or bfloat16."""
    types = {"F32": torch.float32, "BF16": torch.bfloat16}
    return {
        name: torch.from_numpy(one.data).view(types[one.dtype]).view(one.shape).float()
        for name, one in model.items()
    }


@dataclass(frozen=True)
class GpuDivided(Divided):
    """An engine of several ranks that computes in bfloat16."""

    def give(self, change: int, *, share: float = 1.0, old: int | None = None) -> Model:
        new = self._rounded(change, share)
        before = {} if old is None else self._rounded(old, share)
        since = None if old is None else f"{old}"
        give(self.engine, self.model, new, before, since, f"{change}", layout=self.case.layout)
        return new

    def _rounded(self, change: int, share: float) -> Model:
        plain = floats(weights(self.model, change, share))
        return {name: bits_of(tensor.bfloat16()) for name, tensor in plain.items()}


@pytest.fixture(scope="module", params=CASES)
def divided(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Divided]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model") / "model"
    model = (
        make_tiny_mixture(folder, case.kind, **case.config) if case.kind
        else make_tiny_model(folder, width=128)
    )  # fmt: skip
    layout = case.layout
    settings = {
        "tensor_parallel": layout.tensor, "pipeline_parallel": layout.stretches,
        "expert_parallel": layout.whole_experts, "options": {"enforce_eager": True},
    }  # fmt: skip
    with gpu_engine(model, generator=settings, longest=200) as engine:
        assert len(ranks_of(engine)) == layout.ranks - 1
        yield GpuDivided(case, model, engine)


def gaps(divided: Divided, new: Model, drawn: list[tuple[SampleRequest, DrawnAnswer]]) -> np.ndarray:
    """How far logprobs are from those that transformers computes in fp32, by the same weights."""
    whole = {name: bits_of(tensor) for name, tensor in floats(new).items()}
    found = []
    for one, answer in drawn:
        logprobs, _ = by_transformers(divided.model, whole, one, answer)
        found.append(np.abs(answer.logprobs - logprobs))
    return np.concatenate(found)


def test_all_ranks_hold_what_is_published_and_draw_by_it(divided: Divided) -> None:
    apart = gaps(divided, *drawn_after_a_delta(divided))
    assert apart.mean() < 0.05 and np.quantile(apart, 0.9) < 0.2


@pytest.mark.parametrize(
    "work",
    [
        test_divided_engines.test_bits_and_routes_depend_neither_on_neighbours_nor_on_a_move,
        test_divided_engines.test_it_rests_and_goes_on_and_has_the_same_room_on_all_ranks,
    ],
)
def test_as_on_a_cpu(divided: Divided, work: Callable[[Divided], None]) -> None:
    work(divided)

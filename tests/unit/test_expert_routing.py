"""The trainer's routers follow recorded routes, and change no bit where they would choose the same."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed

from consumers.batches.micro_batches import MicroBatch, micro_batch
from consumers.batches.training_rows import TrainingRow
from consumers.learners import expert_routing, forward, sharded_loading
from consumers.learners.expert_routing import (
    RouterDiffers,
    make_followers,
    routers,
    shape_of_routers,
    wrong_routers,
)
from consumers.learners.forward import UnsupportedModel
from consumers.learners.learner import TorchLearner
from consumers.losses.loss import Needs
from consumers.ranks.rank_wire import batch_from_bytes, batch_to_bytes
from consumers.steps.stage_marks import _inputs
from schemas.expert_routes import RouteShape, pack_routes
from schemas.messages import Sample
from tests.factories import TINY_MIXTURES, make_sample, make_spec, make_tiny_mixture, make_tiny_model

SHAPES = {kind: RouteShape(2, 2, 4 if kind == "mixtral" else 8) for kind in TINY_MIXTURES}
SPEC = make_spec(trainer={"exact_sums": True})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {kind: str(make_tiny_mixture(folder / kind, kind)) for kind in TINY_MIXTURES}


def samples_of(spec: Any = SPEC) -> list[Sample]:
    return [make_sample(spec, 0, index, length=4 + 3 * index) for index in range(4)]


class Watched:
    """A learner whose routers tell which experts they chose."""

    def __init__(self, folder: str, spec: Any = SPEC) -> None:
        self.learner = TorchLearner(folder, spec)
        self.chosen: list[torch.Tensor] = []
        for router in routers(self.learner._model):
            router.register_forward_hook(lambda module, given, out: self.chosen.append(out[2]))
        self.state = self.learner.state()

    def batch(self, samples: Sequence[Sample]) -> MicroBatch:
        rows = [TrainingRow(one, 0, number) for number, one in enumerate(samples)]
        return micro_batch(rows, [np.ones(1)] * len(rows), self.learner.loss, 0)

    def step(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Train from where the learner began; return digests of logprobs and gradient."""
        self.learner.restore(self.state)
        self.chosen.clear()
        (stats,) = self.learner.accumulate([self.batch(samples)])
        return stats.digest, self.learner.step(1.0).gradient.digest

    def routes(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return the routes of the last pass, sample by sample."""
        layers = len(routers(self.learner._model))
        every = torch.stack(self.chosen[:layers], dim=1).sort(dim=-1).values.numpy().astype(np.uint8)
        found, start = [], 0
        for one in samples:
            tokens = one.prompt_tokens.size + one.tokens.size
            found.append(every[start : start + tokens - 1])
            start += tokens
        return found


def routed(samples: Sequence[Sample], routes: Sequence[np.ndarray]) -> list[Sample]:
    return [changed(one, routes=pack_routes(its)) for one, its in zip(samples, routes, strict=True)]


@pytest.mark.parametrize("kind", TINY_MIXTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_routes_are_followed_in_both_passes(
    kind: str, dtype: str, checkpointing: bool, folders: dict[str, str]
) -> None:
    spec = make_spec(
        model={"dtype": dtype}, trainer={"exact_sums": True, "gradient_checkpointing": checkpointing}
    )
    watched, samples = Watched(folders[kind], spec), samples_of(spec)
    assert shape_of_routers(watched.learner._model) == SHAPES[kind]
    free = watched.step(samples)
    own = watched.routes(samples)
    assert watched.step(routed(samples, own)) == free, "routes that agree change no bit"
    others = [np.sort((one.astype(int) + 1) % SHAPES[kind].experts, axis=-1).astype(np.uint8) for one in own]
    with_others = watched.step(routed(samples, others))
    assert all(np.array_equal(*pair) for pair in zip(watched.routes(samples), others, strict=True))
    assert with_others[0] != free[0] and with_others[1] != free[1]
    if checkpointing:  # the backward pass computed the layers again, by the same routes
        again = watched.chosen[len(watched.chosen) // 2 :]
        first = watched.chosen[: len(again)]
        assert sorted(one.sum().item() for one in again) == sorted(one.sum().item() for one in first)
    assert watched.step(samples) == free, "routes don't stay"


def test_gradients_reach_the_routers(folders: dict[str, str]) -> None:
    watched, samples = Watched(folders["qwen3_moe"]), samples_of()
    watched.step(samples)
    others = [np.sort(7 - one, axis=-1) for one in watched.routes(samples)]
    watched.learner.restore(watched.state)
    logprobs = watched.learner._forward.logprobs(
        watched.learner._model, watched.batch(routed(samples, others))
    )
    logprobs.sum().backward()
    for router in routers(watched.learner._model):
        assert router.weight.grad.abs().sum() > 0


def test_a_sample_without_routes_is_routed_freely_beside_others(folders: dict[str, str]) -> None:
    watched, samples = Watched(folders["olmoe"]), samples_of()
    watched.step(samples)
    own = watched.routes(samples)
    others = [np.sort((one.astype(int) + 1) % 8, axis=-1).astype(np.uint8) for one in own]
    mixed = [samples[0], *routed(samples[1:], others[1:])]
    watched.step(mixed)
    found = watched.routes(samples)
    assert np.array_equal(found[0][0], own[0][0]), "the first layer sees the same states"
    assert all(np.array_equal(*pair) for pair in zip(found[1:], others[1:], strict=True))


def test_only_the_policy_follows_and_the_reference_is_free(folders: dict[str, str]) -> None:
    spec = make_spec(loss={"kl": 0.1, "kl_in": "loss"})
    watched, samples = Watched(folders["qwen3_moe"], spec), samples_of(spec)
    watched.step(samples)
    others = [np.sort(7 - one, axis=-1) for one in watched.routes(samples)]
    needs = Needs(reference=True, before="step")
    batch = watched.batch(routed(samples, others))
    scores, free = watched.learner.ask(batch, needs), watched.learner.ask(replace(batch, routes=()), needs)
    assert scores.reference is not None and scores.before is not None
    assert np.array_equal(scores.reference, free.reference)
    assert not np.array_equal(scores.before, free.before)


def test_a_run_may_follow_no_routes(folders: dict[str, str]) -> None:
    spec = make_spec(model={"follow_routes": False}, trainer={"exact_sums": True})
    watched, samples = Watched(folders["mixtral"], spec), samples_of(spec)
    free = watched.step(samples)
    others = [np.sort(3 - one, axis=-1) for one in watched.routes(samples)]
    batch = watched.batch(routed(samples, others))
    watched.learner.restore(watched.state)
    (stats,) = watched.learner.accumulate([batch])
    assert stats.digest == free[0]


def test_a_micro_batch_takes_its_routes_to_other_ranks(folders: dict[str, str]) -> None:
    watched, samples = Watched(folders["mixtral"]), samples_of()
    watched.step(samples)
    batch = watched.batch(routed(samples, watched.routes(samples)))
    assert list(batch_from_bytes(batch_to_bytes(batch)).routes) == list(batch.routes)
    assert len(list(_inputs(batch))) == 6 + len(samples), "a replay sees it if routes differ"


class OddRouter(torch.nn.Module):
    """Chooses without topk."""

    top_k, num_experts = 2, 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = hidden @ self.weight.T
        order = scores.argsort(dim=-1, descending=True)[:, :2]
        return scores, scores.gather(-1, order), order


def test_a_router_that_can_not_follow_is_refused(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "does not choose experts by one call of topk" in wrong_routers(OddRouter())
    dense = forward.load_policy(str(make_tiny_model(tmp_path / "dense")), SPEC, torch.device("cpu"))
    assert shape_of_routers(dense) is None and wrong_routers(dense) == ""
    monkeypatch.setattr(forward, "shape_in", lambda config: RouteShape(2, 2, 9))
    with pytest.raises(UnsupportedModel, match=r"can't follow .* Set model.follow_routes: false"):
        forward.load_policy(folders["mixtral"], SPEC, torch.device("cpu"))
    free = make_spec(model={"follow_routes": False})
    forward.load_policy(folders["mixtral"], free, torch.device("cpu"))
    monkeypatch.undo()
    sharded_loading.without_weights(folders["mixtral"], SPEC, torch.device("cpu"))
    monkeypatch.setattr(forward, "wrong_routers", lambda model: "it is odd")
    with pytest.raises(UnsupportedModel, match="can't follow the generators' routes: it is odd"):
        sharded_loading.without_weights(folders["mixtral"], SPEC, torch.device("cpu"))
    sharded_loading.without_weights(folders["mixtral"], free, torch.device("cpu"))


class BiasedRouter(OddRouter):
    """Needs more than the hidden states."""

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(hidden + bias)


def test_a_router_that_is_called_otherwise_is_refused() -> None:
    assert wrong_routers(BiasedRouter()).startswith("BiasedRouter can't be tried: TypeError")


def test_a_router_that_chooses_otherwise_than_when_it_was_tried_ends_the_step() -> None:
    odd = OddRouter()
    make_followers(odd)
    odd.routes = torch.zeros(1, 2, dtype=torch.int16)  # type: ignore[assignment]
    with pytest.raises(RouterDiffers, match=r"set model\.follow_routes to false"):
        odd(torch.randn(1, 8))


def test_routers_are_looked_for_once_a_model(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []

    def look(model: Any) -> list[Any]:
        looked.append(None)
        return routers(model)

    monkeypatch.setattr(expert_routing, "routers", look)
    for model in (folders["mixtral"], str(make_tiny_model(Path(folders["mixtral"]).with_name("dense")))):
        watched = Watched(model)
        looked.clear()
        for _ in range(2):
            watched.step(samples_of())
        assert len(looked) == 1
    known = len(expert_routing._known)
    del watched
    gc.collect()
    assert len(expert_routing._known) < known, "a model that is gone is forgotten"

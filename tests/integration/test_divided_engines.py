"""Engines whose ranks divide experts and layers, with vLLM itself: verified weights, right samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from consumers.learners.expert_routing import routers
from infra.weights.bits import Model
from producers.engines.engine import DrawnAnswer, EngineError, SampleRequest
from producers.engines.remote import RemoteEngine
from schemas.rank_layout import RankLayout
from tests.factories import make_tiny_mixture, make_tiny_model
from tests.integration.test_tensor_parallel import (
    ended,
    give,
    handed_over_midway,
    ranks_of,
    run,
    same_bits,
    started,
    weights,
)
from tests.integration.test_tensor_parallel import (
    request as asked,
)
from tests.waiting import wait_until

LAYERS = 3


@dataclass(frozen=True)
class Case:
    kind: str  # of a mixture; empty: a model without experts, whose embedding is its head
    layout: RankLayout
    guesses: bool = False
    config: dict[str, Any] = field(default_factory=dict)


CASES = {
    "slices of experts": Case("qwen2_moe", RankLayout(2)),  # with an expert that all tokens take
    "stretches of a mixture": Case("mixtral", RankLayout(1, 2), guesses=True),
    "stretches with a tied head": Case("", RankLayout(1, 2)),
    "all at once": Case("olmoe", RankLayout(2, 2, True), config={"num_key_value_heads": 2}),
}


@dataclass(frozen=True)
class Divided:
    """An engine of several ranks, and the model that it has."""

    case: Case
    model: Path
    engine: RemoteEngine

    def give(self, change: int, *, share: float = 1.0, old: int | None = None) -> Model:
        """Install weights, as a delta of older ones if told, and see each rank's digests."""
        new = weights(self.model, change, share)
        before = {} if old is None else weights(self.model, old, share)
        since = None if old is None else f"{old}"
        give(self.engine, self.model, new, before, since, f"{change}", layout=self.case.layout)
        return new


@pytest.fixture(scope="module", params=CASES)
def divided(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Divided]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model") / "model"
    model = (
        make_tiny_mixture(folder, case.kind, num_hidden_layers=LAYERS, **case.config) if case.kind
        else make_tiny_model(folder, layers=LAYERS)
    )  # fmt: skip
    settings = {"pipeline_parallel": case.layout.stretches, "expert_parallel": case.layout.whole_experts}
    engine = started(model, case.layout.tensor, speculation=case.guesses, **settings)
    made = Divided(case, model, engine)
    processes = ranks_of(engine)
    assert len(processes) == case.layout.ranks - 1
    yield made
    engine.close()
    wait_until(lambda: not any(map(psutil.pid_exists, processes)), what="the end of all ranks")
    assert not list(Path("/dev/shm").glob(f"streamrl-{engine.pid}-*"))


def by_transformers(model: Path, new: Model, one: SampleRequest, answer: DrawnAnswer) -> tuple[Any, Any]:
    """Return the logprobs of an answer's tokens and the routes of all, as transformers computes them."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    values = {
        name: torch.from_numpy(bits.data.view(np.float32)).view(bits.shape) for name, bits in new.items()
    }
    net.load_state_dict(values, strict=False)
    chosen: list[torch.Tensor] = []
    for router in routers(net):
        router.register_forward_hook(lambda module, given, out: chosen.append(out[2]))
    whole = torch.tensor([[*one.prompt, *answer.tokens.tolist()]])
    with torch.no_grad():
        logprobs = net(input_ids=whole).logits[0].log_softmax(-1)
    picked = logprobs[len(one.prompt) - 1 : -1].gather(1, whole[0, len(one.prompt) :, None])
    routes = torch.stack(chosen, dim=1).sort(dim=-1).values.numpy()[:-1] if chosen else None
    return picked[:, 0].numpy(), routes


def drawn_after_a_delta(divided: Divided) -> tuple[Model, list[tuple[SampleRequest, DrawnAnswer]]]:
    """Give a delta while samples are drawn; return the weights by then, and further samples with answers.

    Digests are compared by `give`.
    """
    divided.give(1, share=0.05)
    for number in range(6):
        divided.engine.submit(asked(number))
    early = divided.engine.step(0.05)
    new = divided.give(2, share=0.05, old=1)
    assert len(ended(divided.engine, 6 - len(early))) == 6 - len(early)
    some = [asked(number) for number in range(20, 32)]
    answers = run(divided.engine, some)
    assert len(answers) == len(some)
    return new, [(one, answers[one.id]) for one in some]


@pytest.mark.thorough(but=["all at once"])
def test_all_ranks_hold_what_is_published_and_draw_by_it(divided: Divided) -> None:
    new, drawn = drawn_after_a_delta(divided)
    for one, answer in drawn:
        logprobs, routes = by_transformers(divided.model, new, one, answer)
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=2e-4)
        if divided.case.kind:
            np.testing.assert_array_equal(answer.routes, routes)
        else:
            assert answer.routes is None


def test_bits_and_routes_depend_neither_on_neighbours_nor_on_a_move(divided: Divided) -> None:
    divided.give(0)
    some = [asked(number) for number in range(40)]
    together = run(divided.engine, some)
    for one in some[::17]:
        alone = run(divided.engine, [one])[one.id]
        same_bits(alone, together[one.id])
        np.testing.assert_array_equal(alone.routes, together[one.id].routes)
    moving = [SampleRequest(f"{900 + number:07d}-00", [4, 5], 190, number, 1.0) for number in range(3)]
    whole, parts = run(divided.engine, moving), handed_over_midway(divided.engine, moving)
    for one in moving:
        if (part := parts.get(one.id)) is None:  # it was done before it could move
            continue
        rest = SampleRequest(one.id, one.prompt, 190, one.seed, 1.0, made=part.tokens.tolist())
        went_on = run(divided.engine, [rest])[one.id]
        tokens = np.concatenate([part.tokens, went_on.tokens])
        logprobs = np.concatenate([part.logprobs, went_on.logprobs])
        same_bits(DrawnAnswer(one.id, tokens, logprobs), whole[one.id])
        np.testing.assert_array_equal(went_on.routes, whole[one.id].routes)


@pytest.mark.thorough(but=["stretches of a mixture"])
def test_stretches_of_layers_have_the_bits_of_one_rank(divided: Divided) -> None:
    if divided.case.layout.tensor > 1:
        pytest.skip("sums of several ranks round otherwise")
    some = [asked(number) for number in range(30)]
    if divided.case.guesses:  # that the others will be like the first is worth guessing
        some = [SampleRequest(f"{number:07d}-00", [4, 5, 6], 100, 7, 1.0) for number in range(40)]
    alone = started(divided.model, 1)
    try:
        new = divided.give(0)
        give(alone, divided.model, new, layout=RankLayout())
        one = run(alone, some)
        two = {name: answer for each in some[:20] for name, answer in run(divided.engine, [each]).items()}
        two |= run(divided.engine, some[20:])
    finally:
        alone.close()
    for name, answer in one.items():
        same_bits(answer, two[name])
        np.testing.assert_array_equal(answer.routes, two[name].routes)
    assert (divided.engine.pace().accepted > 0) == divided.case.guesses


def test_it_rests_and_goes_on_and_has_the_same_room_on_all_ranks(divided: Divided) -> None:
    """2 MiB of KV cache have no room for all: ranks with other layers must preempt the same samples."""
    divided.engine.submit(asked(1))
    divided.engine.rest()
    divided.engine.go_on()
    assert set(ended(divided.engine, 1)) == {asked(1).id}
    long = [SampleRequest(f"{number:07d}-00", [4, 5, 6], 200, number, 1.0) for number in range(24)]
    assert len(run(divided.engine, long)) == 24


@pytest.mark.parametrize(
    "kinds",
    ["full sliding sliding", "full full sliding sliding"],
)
@pytest.mark.thorough
def test_ranks_that_would_preempt_other_samples_than_each_other_are_refused(
    tmp_path: Path, kinds: str
) -> None:
    """One stretch has layers with windows alone, and windows free blocks that others keep."""
    config = AutoConfig.for_model(
        "gemma3_text", vocab_size=24, hidden_size=64, intermediate_size=64,
        num_hidden_layers=len(kinds.split()),
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=256,
        eos_token_id=1, pad_token_id=0, bos_token_id=None, sliding_window=16,
        layer_types=[f"{kind}_attention" for kind in kinds.split()],
    )  # fmt: skip
    model = make_tiny_model(tmp_path / "model")  # for its tokenizer
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    with pytest.raises(EngineError, match=r"KV caches of different shapes .*pipeline_parallel: 1") as refused:
        started(model, 1, pipeline_parallel=2)
    assert refused.value.lasting

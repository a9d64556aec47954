"""An engine of two ranks with vLLM itself: bits that no batch changes, verified slices, and no orphan."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from infra.weights.bits import Model, model_of
from infra.weights.digest import model_digests
from infra.weights.patch import PatchFile
from infra.weights.slices import SliceDigests, Slicing
from producers.engines.engine import DrawnAnswer, EngineError, Installed, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from schemas.rank_layout import RankLayout
from tests.factories import make_spec, make_tiny_model
from tests.waiting import wait_until

RANKS = 2
LAYOUT = RankLayout(RANKS)
DEADLINE_S = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def options(model: Path, ranks: int = RANKS, **more: Any) -> EngineOptions:
    generator = {"slots": 8, "kv_cache_mib": 2, "tensor_parallel": ranks, **more}
    sampling = {"max_tokens": 200, "max_prompt_tokens": 56}
    spec = make_spec(generator=generator, sampling=sampling, trainer={"microbatch_tokens": 256})
    return EngineOptions(model=str(model), spec=spec.model_dump_json())


def started(model: Path, ranks: int = RANKS, **more: Any) -> RemoteEngine:
    return ready(RemoteEngine(options(model, ranks, **more), threading.Event(), deadline_s=DEADLINE_S).open())


def ready(engine: RemoteEngine) -> RemoteEngine:
    """The engine, when it is ready. One that can't start leaves no process behind."""
    try:
        engine.wait_until_ready()
    except BaseException:
        engine.close()
        raise
    return engine


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RemoteEngine]:
    made = started(model)
    give(made, model, weights(model))
    yield made
    processes = ranks_of(made)
    made.close()
    wait_until(lambda: not any(map(psutil.pid_exists, processes)), what="the end of all ranks")
    assert not list(Path("/dev/shm").glob(f"streamrl-{made.pid}-*"))


def ranks_of(engine: RemoteEngine) -> list[int]:
    """The processes of the other ranks than rank 0."""
    return [
        child.pid for child in psutil.Process(engine.pid).children() if "rank_process" in str(child.cmdline())
    ]


def weights(model: Path, change: int = 0, share: float = 1.0) -> Model:
    """The model's weights; a share of them moved by a little."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    noise = torch.Generator().manual_seed(change)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        step = 0.1 * bool(change) * torch.randn(tensor.shape, generator=noise)
        return tensor + step * (torch.rand(tensor.shape, generator=noise) < share)

    return model_of({name: moved(tensor.detach()).contiguous() for name, tensor in net.named_parameters()})


def give(
    engine: RemoteEngine, model: Path, new: Model, old: Model | None = None, since: str | None = None,
    root: str = "r", *, recompute: bool = False, layout: RankLayout = LAYOUT,
) -> Installed:  # fmt: skip
    """Install weights, and see that each rank holds its slices of them."""
    engine.prepare(PatchFile(old or {}, new, since=since, root=root))
    wait_until(engine.is_ready, what="its being ready")
    installed = engine.install(recompute=recompute)
    wait_until(engine.digests, what="what it holds")
    expected = SliceDigests(Slicing.for_engine(model, layout)).of(new, model_digests(new))
    assert engine.digests() == expected
    return installed


def request(number: int) -> SampleRequest:
    return SampleRequest(f"{number:07d}-00", [4 + number % 9, 5, 6], 8 + number % 40, 1000 + number, 1.0)


def run(engine: RemoteEngine, requests: Sequence[SampleRequest]) -> dict[str, DrawnAnswer]:
    for one in requests:
        engine.submit(one)
    return ended(engine, len(requests))


def ended(engine: RemoteEngine, count: int) -> dict[str, DrawnAnswer]:
    found: dict[str, DrawnAnswer] = {}

    def all_there() -> bool:
        found.update({finished.id: finished for finished in engine.step(0.2)})
        return len(found) == count

    wait_until(all_there, what=f"{count} samples", deadline_s=120)
    return found


def same_bits(one: DrawnAnswer, other: DrawnAnswer) -> None:
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert len(one.logprobs) == len(one.tokens) > 0


def test_a_sample_has_the_same_bits_in_any_batch(engine: RemoteEngine) -> None:
    assert engine.pace().batches[0] == 1 and engine.pace().keeps_bits
    requests = [request(number) for number in range(60)]
    together = run(engine, requests)
    backwards = run(engine, requests[::-1])
    for one in requests:
        same_bits(backwards[one.id], together[one.id])
    for one in requests[::19]:
        same_bits(run(engine, [one])[one.id], together[one.id])


def test_a_group_computes_its_prompt_once_on_all_ranks(engine: RemoteEngine) -> None:
    prompt = [4 + number % 9 for number in range(150)]
    group = [SampleRequest(f"{number:07d}-00", prompt, 20, number, 1.0) for number in range(12)]
    whole = run(engine, [replace(one, endless=True) for one in group])
    before = engine.pace().shared
    found = run(engine, group)
    assert engine.pace().shared - before >= 11 * 128
    for name, one in found.items():
        end = len(one.tokens)
        same_bits(
            one, replace(whole[name], tokens=whole[name].tokens[:end], logprobs=whole[name].logprobs[:end])
        )


def test_it_draws_as_one_rank_does_but_for_rounding(model: Path, engine: RemoteEngine) -> None:
    alone = started(model, ranks=1)
    try:
        requests = [request(number) for number in range(20)]
        one, two = run(alone, requests), run(engine, requests)
    finally:
        alone.close()
    for name, answer in one.items():
        np.testing.assert_array_equal(answer.tokens, two[name].tokens)
        np.testing.assert_allclose(answer.logprobs, two[name].logprobs, atol=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_reach_running_samples_on_all_ranks_between_the_same_steps(
    model: Path, engine: RemoteEngine, recompute: bool
) -> None:
    old, new = weights(model), weights(model, change=1, share=0.02)
    give(engine, model, old, root="old")
    for number in range(12):
        engine.submit(request(number))
    engine.abort([request(11).id, "0000099-00"])
    give(engine, model, new, old, since="old", root="new", recompute=recompute)
    assert set(ended(engine, 11)) == {request(number).id for number in range(11)}
    fresh = run(engine, [request(3)])
    give(engine, model, old, root="old")
    give(engine, model, new, root="new")
    same_bits(run(engine, [request(3)])[request(3).id], fresh[request(3).id])
    give(engine, model, old, root="old")


@pytest.mark.thorough
def test_four_ranks_have_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """vLLM's own sum on CPUs would have other bits on each of them."""
    model = make_tiny_model(tmp_path / "model", width=128, heads=4)
    engine = started(model, ranks=4)
    try:
        give(engine, model, weights(model, change=1), layout=RankLayout(4))
        requests = [request(number) for number in range(10)]
        together = run(engine, requests)
        for one in requests[::4]:
            same_bits(run(engine, [one])[one.id], together[one.id])
    finally:
        engine.close()


def test_samples_move_with_their_bits(engine: RemoteEngine) -> None:
    requests = [SampleRequest(f"{number:07d}-00", [4, 5], 190, number, 1.0) for number in range(4)]
    whole = run(engine, requests)
    parts = handed_over_midway(engine, requests)
    for one in requests:
        if (part := parts.get(one.id)) is None:
            continue
        rest = SampleRequest(one.id, one.prompt, 190, one.seed, 1.0, made=part.tokens.tolist())
        went_on = run(engine, [rest])[one.id]
        tokens = np.concatenate([part.tokens, went_on.tokens])
        logprobs = np.concatenate([part.logprobs, went_on.logprobs])
        np.testing.assert_array_equal(tokens, whole[one.id].tokens)
        np.testing.assert_array_equal(logprobs, whole[one.id].logprobs)


def handed_over_midway(engine: RemoteEngine, requests: Sequence[SampleRequest]) -> dict[str, DrawnAnswer]:
    """Begin samples and take them back with some tokens each. Return those that had not ended."""
    parts: dict[str, DrawnAnswer] = {}

    def taken() -> bool:
        for one in requests:
            engine.submit(one)
        found: list[DrawnAnswer] = []

        def some_drawn() -> bool:
            found.extend(engine.step(0.02))
            return bool(found) or sum(engine.unfinished().values()) > 20

        wait_until(some_drawn, what="some tokens")
        parts.update({part.id: part for part in engine.hand_over([one.id for one in requests])})
        while len(found) + len(parts) < len(requests):  # a busy machine may make whole samples meanwhile
            found += engine.step(0.1)
        if not any(part.tokens.size for part in parts.values()):
            parts.clear()
        return bool(parts)

    wait_until(taken, what="a sample with some tokens")
    return parts


@pytest.mark.thorough
def test_drafts_change_no_bit_though_ranks_have_clocks_of_their_own(
    model: Path, engine: RemoteEngine
) -> None:
    same = [SampleRequest(f"{number:07d}-00", [4, 5, 6], 100, 7, 1.0) for number in range(40)]
    plain = run(engine, same[:1])[same[0].id]
    drafting = started(model, speculation=True)
    try:
        give(drafting, model, weights(model))
        for one in same:  # one after the other: the first one's answer is what all others are
            same_bits(run(drafting, [one])[one.id], plain)
            wait_until(lambda: drafting.step(0.01) or True, what="its reports")
        together = [request(number) for number in range(30)]
        drafted, without = run(drafting, together), run(engine, together)
        for name, answer in drafted.items():
            same_bits(answer, without[name])
        for one in same:
            drafting.submit(one)
        ended(drafting, len(same))
        assert drafting.pace().accepted > 0
    finally:
        drafting.close()


def test_it_rests_and_goes_on(engine: RemoteEngine) -> None:
    engine.submit(request(1))
    engine.rest()
    engine.go_on()
    assert set(ended(engine, 1)) == {request(1).id}


def test_a_rank_that_is_killed_ends_the_engine_and_is_named(model: Path) -> None:
    engine = started(model)
    (rank,) = ranks_of(engine)
    engine.submit(SampleRequest("0000001-00", [4], 200, 1, 1.0))
    os.kill(rank, signal.SIGKILL)
    try:
        with pytest.raises(
            EngineError, match=rf"rank 1 of the engine \(process {rank}\) ended with status -9"
        ):
            ended(engine, 1)
    finally:
        engine.close()


def end_with_rank_0(engine: RemoteEngine) -> None:
    ranks = ranks_of(engine)
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(psutil.pid_exists, ranks)), what="the end of the other ranks")
    assert not list(Path("/dev/shm").glob(f"streamrl-{engine.pid}-*"))


@pytest.mark.thorough
def test_ranks_end_with_rank_0(model: Path) -> None:
    engine = started(model)
    end_with_rank_0(engine)
    engine.close()


def test_sums_in_shared_memory_have_the_same_bits_and_leave_nothing_behind(
    model: Path, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_CORES", "3")  # on two cores the ranks of other tests sum over gloo
    requests = [request(number) for number in range(10)]
    over_gloo = run(engine, requests)
    in_memory = started(model)
    try:
        give(in_memory, model, weights(model))
        for name, answer in run(in_memory, requests).items():
            same_bits(answer, over_gloo[name])
        end_with_rank_0(in_memory)
    finally:
        in_memory.close()

"""Speculation in vLLM: the same tokens and logprobs as without, whatever is drafted and happens beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed import cleanup_dist_env_and_memory

from producers.engines.engine import DrawnAnswer, SampleRequest
from producers.engines.history_drafter import HistoryDrafter
from producers.engines.measured_steps import measure_steps
from producers.engines.speculation import Speculation
from producers.engines.vllm_in_process import VllmEngine
from producers.stopping import Stopping
from tests.engine_draws import finish, run
from tests.factories import make_patch, make_tiny_model

LEAST, END = 5, 1
LETTERS = "??0123456789:- abcdefg"
PAIRS = [f"{one}{other}" for one in "13579" for other in "0246:- ceg"]  # any tenth token completes one


class Liar:
    """Drafts what it was told, or nonsense, of any length."""

    def __init__(self) -> None:
        self.right: dict[str, list[int]] = {}
        self._random = np.random.default_rng(0)

    def open(self, name: str, prompt: Sequence[int]) -> None:
        pass

    def draft(self, name: str, text: Sequence[int], most: int) -> tuple[list[int], int]:
        count = int(self._random.integers(0, most + 1))
        if self._random.random() < 0.6 and name in self.right:
            return self.right[name][len(text) : len(text) + count], 5
        return self._random.integers(0, 24, count).tolist(), 5

    def close(self, name: str, text: Sequence[int]) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(model: Path) -> Iterator[VllmEngine]:
    stopping = Stopping(
        lambda tokens: "".join(LETTERS[token] if token < len(LETTERS) else "?" for token in tokens),
        stop=PAIRS, min_tokens=LEAST, end_tokens=[END],
    )  # fmt: skip
    engine = VllmEngine(
        str(model), slots=16, max_model_len=256, kv_cache_mib=1, stopping=stopping, drafter=Liar()
    )
    measure_steps(engine, 16)
    install(engine, model, 0, recompute=False)
    yield engine
    cleanup_dist_env_and_memory()


@pytest.fixture
def liar(made: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Liar:
    """Whatever it drafts is used."""
    assert made._speculation
    plan, liar = made._speculation._plan, Liar()
    monkeypatch.setattr(made._speculation, "_drafter", liar)
    monkeypatch.setattr(plan, "attention", lambda samples: samples)
    monkeypatch.setattr(plan, "least_chance", lambda samples: 0.0)
    monkeypatch.setattr(plan, "lengths", lambda samples, looked, chances: [len(one) for one in chances])
    return liar


@pytest.fixture
def plain(made: VllmEngine) -> Iterator[None]:
    """Nothing ends but at the longest length."""
    params = made._params

    def never_ends(tokens: int) -> object:
        found = params(tokens)
        found.ignore_eos = True  # type: ignore[attr-defined]
        return found

    stop, made._stopping._stop = made._stopping._stop, []
    made._params = never_ends  # type: ignore[assignment]
    yield
    made._params, made._stopping._stop = params, stop


def install(engine: VllmEngine, model: Path, change: int, *, recompute: bool) -> dict[str, int]:
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    noise = torch.Generator().manual_seed(change)
    engine.prepare(
        make_patch(
            {
                name: one.detach() + 0.1 * bool(change) * torch.randn(one.shape, generator=noise)
                for name, one in net.named_parameters()
            }
        ).read()
    )
    return engine.install(recompute=recompute)


def request(number: int, tokens: int, prompt: int | None = None) -> SampleRequest:
    first = 4 + (number if prompt is None else prompt) % 9
    return SampleRequest(f"{number:07d}-00", [first, 5, 6], tokens, 1000 + number, float(tokens))


def without(engine: VllmEngine, requests: Sequence[SampleRequest]) -> dict[str, DrawnAnswer]:
    kept, engine._speculation = engine._speculation, None
    try:
        return run(engine, requests)
    finally:
        engine._speculation = kept


def same(found: Mapping[str, DrawnAnswer], expected: Mapping[str, DrawnAnswer]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        np.testing.assert_array_equal(found[name].tokens, one.tokens)
        np.testing.assert_array_equal(found[name].logprobs, one.logprobs)
        assert found[name].finish == one.finish


def teach(liar: Liar, requests: Sequence[SampleRequest], answers: Mapping[str, DrawnAnswer]) -> None:
    """Let it know the answers, and more behind their ends."""
    liar.right = {one.id: [*one.prompt, *answers[one.id].tokens.tolist(), 3, 4, 5] for one in requests}


def test_answers_that_end_in_the_middle_of_a_draft_end_where_they_must(made: VllmEngine, liar: Liar) -> None:
    requests = [request(number, 8 + number % 23) for number in range(160)]
    expected = without(made, requests)
    teach(liar, requests, expected)
    speculation = made._speculation
    assert speculation
    drafted, accepted = speculation.counts()
    same(run(made, requests), expected)
    assert speculation.counts()[0] > drafted + 500 and speculation.counts()[1] > accepted + 200
    ends = Counter(
        one.finish if one.finish == "length" else "end" if one.tokens[-1] == END else "string"
        for one in expected.values()
    )
    assert min(ends[kind] for kind in ("length", "end", "string")) > 3, ends
    assert min(len(one.tokens) for one in expected.values() if one.finish == "stop") == LEAST + 1
    assert made.pace().drafted == speculation.counts()[0]
    assert speculation._open == {} and speculation._guesses == {}


def test_the_same_bits_through_preemption(made: VllmEngine, liar: Liar, plain: None) -> None:
    requests = [request(number, 200) for number in range(16)]
    expected: dict[str, DrawnAnswer] = {}
    for start in range(0, 16, 4):
        expected |= without(made, requests[start : start + 4])
    teach(liar, requests, expected)
    for one in requests:
        made.submit(one)
    found, preempted = dict[str, DrawnAnswer](), 0
    while made.unfinished():
        found |= {finished.id: finished for finished in made.step()}
        preempted += sum(r.num_preemptions for r in made._scheduler.requests.values())
    assert preempted > 0, "the cache was large enough: this test shows nothing"
    same(found, expected)


def test_a_group_computes_its_prompt_once_and_has_the_same_bits(
    made: VllmEngine, liar: Liar, plain: None
) -> None:
    prompt = [4 + number % 9 for number in range(150)]
    group = [SampleRequest(f"{number:07d}-00", prompt, 60, 1000 + number, 60.0) for number in range(12)]
    expected = without(made, [replace(one, endless=True) for one in group])
    teach(liar, group, expected)
    before = made.pace().shared
    same(run(made, group), expected)
    assert made.pace().shared - before >= 11 * 128


def test_a_sample_that_moves_has_the_same_bits(made: VllmEngine, liar: Liar, plain: None) -> None:
    asked = request(3, 60)
    whole = without(made, [asked])[asked.id]
    teach(liar, [asked], {asked.id: whole})
    tokens, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    for steps in (1, 2, 3):
        made.submit(replace(asked, made=tokens.tolist()))
        for _ in range(steps):
            made.step()
        (part,) = made.hand_over([asked.id])
        assert len(part.tokens) == len(part.logprobs) >= steps
        tokens, logprobs = np.concatenate([tokens, part.tokens]), np.concatenate([logprobs, part.logprobs])
    last = run(made, [replace(asked, made=tokens.tolist())])[asked.id]
    np.testing.assert_array_equal(np.concatenate([tokens, last.tokens]), whole.tokens)
    np.testing.assert_array_equal(np.concatenate([logprobs, last.logprobs]), whole.logprobs)


@pytest.mark.parametrize("recompute", [True, False])
def test_weights_that_are_installed_between_drafts(
    made: VllmEngine, model: Path, liar: Liar, plain: None, recompute: bool
) -> None:
    """As without drafts, with the weights installed behind the same token."""
    asked = request(7, 80)
    teach(liar, [asked], without(made, [asked]))
    made.submit(asked)
    for _ in range(4):
        made.step()
    tokens = install(made, model, 3, recompute=recompute)[asked.id]
    found = finish(made)
    install(made, model, 0, recompute=False)
    kept, made._speculation = made._speculation, None
    made.submit(asked)
    while made.unfinished()[asked.id] < tokens:
        made.step()
    install(made, model, 3, recompute=recompute)
    expected = finish(made)
    made._speculation = kept
    install(made, model, 0, recompute=False)
    assert 4 < tokens < 80
    same(found, expected)


def test_samples_that_are_dropped_leave_nothing_behind(made: VllmEngine, liar: Liar) -> None:
    requests = [request(number, 40) for number in range(6)]
    for one in requests:
        made.submit(one)
    made.step()
    made.step()
    made.abort([one.id for one in requests if one.id in made.unfinished()])
    assert made._speculation and made._speculation._open == {}
    same(run(made, requests), without(made, requests))


def test_later_answers_to_a_prompt_are_drafted_from_earlier_ones_by_measured_times(
    made: VllmEngine, plain: None
) -> None:
    """With nothing forced. A seed that comes again stands for answers that are all alike."""
    speculation = Speculation(made._runner, made._scheduler, made._sampler, HistoryDrafter(4096))
    made._speculation, kept = speculation, made._speculation
    assert kept
    speculation.learn(kept._plain.pace())
    alike = [replace(request(number, 150, prompt=0), seed=5) for number in range(6)]
    found = dict[str, DrawnAnswer]()
    for one in alike:
        found |= run(made, [one])
    drafted, accepted = speculation.counts()
    made._speculation = kept
    assert accepted > 0.8 * drafted > 0
    same(found, {one.id: replace(without(made, [alike[0]])[alike[0].id], id=one.id) for one in alike})

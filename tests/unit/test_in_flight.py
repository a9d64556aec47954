"""Batches under way in an engine that schedules asynchronously: nothing is lost, no token is miscounted."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.weights.patch import Patch, PatchFile
from producers.engines.engine import DrawnAnswer, EngineError, SampleRequest
from producers.engines.in_flight import InFlight
from producers.engines.open_requests import OpenRequests
from producers.engines.pace import StepTimes
from producers.engines.redrawing import RedrawBatch, RedrawnWeights, redraw
from producers.engines.sampler import StreamSampler
from producers.engines.vllm_in_process import VllmEngine
from producers.stopping import Stopping
from tests.fakes.queued_vllm import END, LOGITS, LateCopy, QueuedVllm

PROMPT = [3, 4]


def text(tokens: list[int]) -> str:
    return "".join("abcdef"[token] for token in tokens)


class Weights:
    """New weights come beside a batch that a GPU is done with, and are there before the next one begins."""

    def __init__(self, vllm: QueuedVllm) -> None:
        self._vllm = vllm

    def prepare(self, patch: Patch) -> None: ...

    def digests(self) -> dict[str, str]:
        return {}

    def take(self) -> None:
        self._vllm.version += 1

    def settle(self) -> None:
        assert not self._vllm.core.batch_queue


def engine_of(vllm: QueuedVllm, stop: list[str]) -> VllmEngine:
    """An engine without vLLM."""
    engine = VllmEngine.__new__(VllmEngine)
    engine._engine, engine._scheduler, engine._runner = vllm, vllm.scheduler, vllm
    engine._in_flight, engine._drained, engine._made = InFlight(vllm), [], {}
    engine._sampler, engine._speculation, engine._slots, engine._times = vllm.sampler, None, 8, StepTimes()
    engine._stopping, engine.weights = Stopping(text, stop=stop), Weights(vllm)  # type: ignore[assignment]
    engine._arrived, engine._rank = 0.0, None
    engine._shared = SimpleNamespace(on=True, salt="0", renew=lambda: None)  # type: ignore[assignment]
    engine._params = lambda tokens: tokens  # type: ignore[assignment,return-value]
    return engine


def expected(seed: int, at: int, version: int) -> tuple[int, np.float32]:
    """The token and its logprob that a sampler alone draws."""
    sampler = StreamSampler()
    sampler.open("a", seed, at)
    sampler.batch = SimpleNamespace(req_ids=["a-12345678"], req_output_token_ids=[[]])
    tokens, _ = sampler(LOGITS[version, at][None].clone(), {}, None, None)
    return int(tokens[0]), sampler.close("a")[0]


class Ledger:
    """Samples as a generator has them: which version draws them from which token on."""

    def __init__(self, vllm: QueuedVllm, stop: list[str]) -> None:
        self.vllm, self.engine, self.stop = vllm, engine_of(vllm, stop), stop
        self.starts: dict[str, list[tuple[int, int]]] = {}
        self.parts: dict[str, DrawnAnswer] = {}
        self.installed = self.submitted = 0
        self.done: set[str] = set()

    def submit(self) -> None:
        name = f"{self.submitted:07d}-00"
        self.submitted += 1
        self.starts[name] = [(0, self.installed)]
        self.engine.submit(self.request(name))

    def request(self, name: str, made: tuple[int, ...] = ()) -> SampleRequest:
        return SampleRequest(name, PROMPT, 7 + int(name[:7]) % 9, 1000 + int(name[:7]), 1.0, made)

    def step(self) -> None:
        for answer in self.engine.step():
            self.check(answer)
            self.done.add(answer.id)

    def install(self) -> None:
        if self.installed == len(LOGITS) - 1:
            return
        self.installed += 1
        for name, tokens in self.engine.install(recompute=False).items():
            self.starts[name].append((self.before(name) + tokens, self.installed))

    def before(self, name: str) -> int:
        return self.parts[name].tokens.size if name in self.parts else 0

    def move(self) -> None:
        """Hand a sample over, and let the same engine go on with it."""
        for name in self.open()[:2]:
            for part in self.engine.hand_over([name]):
                whole = self.whole(part)
                self.parts[name] = whole
                self.starts[name] = [one for one in self.starts[name] if one[0] <= whole.tokens.size]
                self.check_tokens(whole)
                if whole.tokens.size < self.request(name).max_tokens:
                    self.engine.submit(self.request(name, tuple(whole.tokens.tolist())))

    def abort(self) -> None:
        for name in self.open()[:1]:
            self.engine.abort([name])
            del self.starts[name]
            self.done.add(name)

    def open(self) -> list[str]:
        return [name for name in self.starts if name not in self.done]

    def whole(self, part: DrawnAnswer) -> DrawnAnswer:
        if part.id not in self.parts:
            return part
        before = self.parts[part.id]
        return DrawnAnswer(
            part.id, np.concatenate([before.tokens, part.tokens]),
            np.concatenate([before.logprobs, part.logprobs]), part.finish,
        )  # fmt: skip

    def check(self, answer: DrawnAnswer) -> None:
        whole = self.whole(answer)
        self.check_tokens(whole)
        tokens, said = whole.tokens.tolist(), self.request(whole.id)
        ends = [n for n, token in enumerate(tokens) if token == END]
        stops = [n for n in range(len(tokens)) if any(one in text(tokens[: n + 1]) for one in self.stop)]
        last = min([*ends, *stops, said.max_tokens - 1])
        assert len(tokens) == last + 1
        assert whole.finish == ("stop" if last in [*ends, *stops[:1]] else "length")
        assert all(at <= len(tokens) for at, _ in self.starts[whole.id])

    def check_tokens(self, whole: DrawnAnswer) -> None:
        seed, tokens = self.request(whole.id).seed, whole.tokens.tolist()
        versions = [[v for at, v in self.starts[whole.id] if at <= n][-1] for n in range(len(tokens))]
        right = [expected(seed, n, version) for n, version in enumerate(versions)]
        assert tokens == [token for token, _ in right]
        assert whole.logprobs.tolist() == [float(logprob) for _, logprob in right]


kinds = ["submit", "step", "step", "step", "install", "move", "abort"]
orders_of_any_kind = st.lists(st.sampled_from(kinds), max_size=60)


@settings(max_examples=150, deadline=None)
@given(orders_of_any_kind, st.booleans(), st.sampled_from([[], ["cd", "ff"]]))
def test_each_token_is_that_of_the_version_that_the_record_says(
    orders: list[str], queued: bool, stop: list[str]
) -> None:
    ledger = Ledger(QueuedVllm(queued=queued, prompt=len(PROMPT)), stop)
    for order in orders:
        getattr(ledger, order)()
    for _ in range(40):
        ledger.step()
    assert ledger.open() == [] and ledger.engine.unfinished() == {} and ledger.engine._drained == []
    if not {"move", "install"} & set(orders):
        assert not any(copy.waited_for for copy in ledger.vllm.copies), "it waited for a batch under way"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("queued", [False, True])
def test_weights_change_at_the_same_tokens_when_samples_are_drawn_again(count: int, queued: bool) -> None:
    vllm = QueuedVllm(queued=queued, prompt=len(PROMPT))
    patch = PatchFile({}, {}, since=None, root="r")
    requests = [SampleRequest(f"{n:07d}-00", PROMPT, 20, 2007 + n, 1.0) for n in range(count)]
    begins, changes = [0, 2, 3][:count], [4, 7]
    weights = [RedrawnWeights(str(patch.path), {})] * 2
    batch = RedrawBatch(
        first=None, begins=begins, requests=requests, changes=changes, weights=weights, recompute=[False] * 2
    )
    drawn = redraw(engine_of(vllm, []), batch)
    assert max(begin + len(one.tokens) for begin, one in zip(begins, drawn, strict=True)) > 9, "too short"
    for one, begin, found in zip(requests, begins, drawn, strict=True):
        versions = [sum(begin + n >= change for change in changes) for n in range(len(found.tokens))]
        right = [expected(one.seed, n, version) for n, version in enumerate(versions)]
        assert found.tokens.tolist() == [token for token, _ in right]
        assert found.logprobs.tolist() == [float(logprob) for _, logprob in right]
        assert len(found.tokens) == 20 or found.tokens[-1] == END


def test_an_answer_that_ends_while_a_batch_is_drained_comes_with_the_next_step() -> None:
    ledger = Ledger(QueuedVllm(queued=True, prompt=len(PROMPT)), [])
    request = SampleRequest("0000001-00", PROMPT, 1, 1001, 1.0)
    for ended in (False, True):
        ledger.engine.submit(request)
        assert ledger.engine.step() == [] and ledger.engine.unfinished() == {request.id: 1}
        assert ledger.engine.install(recompute=False) == {}, "it has ended"
        assert ledger.engine.hand_over([request.id]) == []
        if ended:
            assert [one.id for one in ledger.engine.step()] == [request.id]
        else:
            ledger.engine.abort([request.id])
            assert ledger.engine.step() == []


def test_one_token_behind_the_end_is_dropped_and_no_more() -> None:
    vllm = QueuedVllm(queued=True, prompt=len(PROMPT))
    engine = engine_of(vllm, [])
    engine.submit(SampleRequest("0000001-00", PROMPT, 9, 1, 1.0))
    engine.step()
    engine.step()
    assert (engine._in_flight.count, engine._sampler.drawn("0000001-00")) == (1, 2)
    vllm.core.batch_queue.clear()
    with pytest.raises(EngineError, match="made 1 tokens of sample 0000001-00, but 2 logprobs"):
        engine._logprobs("0000001-00", 1)


def late_requests() -> tuple[OpenRequests, list[LateCopy]]:
    """Requests whose logprobs come when a test says so."""
    copies: list[LateCopy] = []

    def fetch(values: torch.Tensor) -> tuple[torch.Tensor, LateCopy]:
        copies.append(LateCopy(values))
        return copies[-1].copy, copies[-1]

    return OpenRequests(fetch), copies


def test_late_logprobs_are_not_those_of_the_next_request_in_a_slot() -> None:
    requests, copies = late_requests()
    requests.open("a", 1, 0)
    slots = np.array([requests.slot("a")])
    for at in range(3):
        requests.put(slots, np.array([at]), torch.tensor([-1.0 - at]))
        copies[0].come()
    copies[1].come()
    assert requests.close("a", 2).tolist() == [-1.0, -2.0] and not copies[2].waited_for
    requests.open("b", 1, 0)
    assert requests.slot("b") == slots[0]
    requests.put(slots, np.array([0]), torch.tensor([-9.0]))
    assert requests.close("b").tolist() == [-9.0]
    assert copies[3].waited_for


def test_a_draw_of_a_prompt_that_is_not_whole_leaves_no_logprob() -> None:
    requests, _ = late_requests()
    requests.open("a", 1, 0)
    slots = np.array([requests.slot("a")])
    for logprob in (-5.0, -1.0):
        requests.put(slots, np.zeros(1, np.int64), torch.tensor([logprob]))
    assert requests.drawn("a") == 1
    assert requests.close("a", 1).tolist() == [-1.0]

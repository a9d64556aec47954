"""vLLM on a chat model: end tokens, stop strings over a boundary of engines, `min_tokens` and the trainer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from consumers.batches.micro_batches import micro_batch
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from infra.end_tokens import end_tokens
from producers.chat import load_tokenize_prompt
from producers.engines.engine import DrawnAnswer, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from producers.stopping import stopping_of
from producers.tokenizing import load_decode
from schemas.runspec import RunSpec
from tests.factories import make_chat_model, make_patch, make_sample, make_spec
from tests.waiting import wait_until

LEAST, MOST = 6, 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompt(model: Path) -> list[int]:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    return load_tokenize_prompt(str(model), make_spec().task, 0.0)(said)


@torch.no_grad()
def likely_pairs(model: Path, prompt: list[int]) -> list[str]:
    """Texts of two tokens that the model often draws one after the other."""
    net, draw = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), torch.Generator()
    tokens = torch.tensor([prompt] * 64)
    for _ in range(MOST):
        chances = net(input_ids=tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draw)], dim=1)
    decode = load_decode(str(model))
    answers = tokens[:, len(prompt) :].tolist()
    pairs = Counter(decode(row[at : at + 2]) for row in answers for at in range(MOST - 1))
    readable = [pair for pair, _ in pairs.most_common() if len(pair) == 2 and pair.isprintable()]
    return [pair for pair in readable if "\ufffd" not in pair][:12]


@pytest.fixture(scope="module")
def spec(model: Path, prompt: list[int]) -> RunSpec:
    stop = likely_pairs(model, prompt)
    assert len(stop) == 12
    return make_spec(
        generator={"slots": 8, "kv_cache_mib": 8, "speculation": True}, trainer={"microbatch_tokens": 512},
        sampling={"max_tokens": MOST, "max_prompt_tokens": 80, "min_tokens": LEAST, "stop": stop},
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(model: Path, spec: RunSpec) -> Iterator[RemoteEngine]:
    options = EngineOptions(model=str(model), spec=spec.model_dump_json())
    made = RemoteEngine(options, threading.Event(), deadline_s=600).open()
    made.wait_until_ready()
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made.prepare(make_patch({name: tensor.detach() for name, tensor in net.named_parameters()}))
    wait_until(made.is_ready, what="its being ready")
    made.install(recompute=False)
    wait_until(made.digests, what="what it holds")
    yield made
    made.close()


def request(prompt: list[int], number: int) -> SampleRequest:
    return SampleRequest(f"{number:07d}-00", prompt, MOST, 1000 + number, 1.0)


def run(engine: RemoteEngine, requests: list[SampleRequest]) -> dict[str, DrawnAnswer]:
    found: dict[str, DrawnAnswer] = {}
    for one in requests:
        engine.submit(one)

    def all_there() -> bool:
        found.update({finished.id: finished for finished in engine.step(0.2)})
        return len(found) == len(requests)

    wait_until(all_there, what=f"{len(requests)} samples")
    return found


def naive_end(tokens: list[int], spec: RunSpec, model: Path) -> int | None:
    """After how many tokens a stop string is complete that was not so before."""
    decode = load_decode(str(model))
    for n in range(LEAST + 1, len(tokens) + 1):
        before, text = decode(tokens[: n - 1]), decode(tokens[:n])
        if any(text.count(one) > before.count(one) for one in spec.sampling.stop):
            return n
    return None


def test_each_answer_ends_where_it_must(
    engine: RemoteEngine, model: Path, spec: RunSpec, prompt: list[int]
) -> None:
    ends, stopping, decode = end_tokens(str(model)), stopping_of(str(model), spec), load_decode(str(model))
    assert ends == [257, 259], "of generation_config.json: the tokenizer's own is the first"
    how: Counter[str] = Counter()
    made = run(engine, [request(prompt, number) for number in range(400)])
    for answer in made.values():
        tokens = answer.tokens.tolist()
        assert not set(tokens[:LEAST]) & set(ends) and not set(tokens[:-1]) & set(ends)
        stopped = naive_end(tokens, spec, model)
        assert stopped in (None, len(tokens))
        text = stopping.text(answer.tokens)
        if stopped:
            assert any(decode(tokens) == text + one for one in spec.sampling.stop)
        else:
            assert text == decode(tokens)
        how["a stop string" if stopped else str(tokens[-1]) if tokens[-1] in ends else "length"] += 1
        assert answer.finish == ("stop" if stopped or tokens[-1] in ends else "length")
        assert len(tokens) == MOST or answer.finish == "stop"
    assert min(how[kind] for kind in ("a stop string", "257", "259")) > 0, how


def test_the_trainer_computes_the_logprobs_that_the_engine_drew_by(
    engine: RemoteEngine, model: Path, spec: RunSpec, prompt: list[int]
) -> None:
    made = run(engine, [request(prompt, number) for number in range(40)])
    learner = TorchLearner(str(model), spec)
    samples = [
        make_sample(
            spec, 0, 0, prompt_tokens=np.array(prompt, np.int32), tokens=one.tokens, logprobs=one.logprobs
        )
        for one in made.values()
    ]
    batch = micro_batch([TrainingRow(one, 0, n) for n, one in enumerate(samples)], None, learner.loss, 0)
    with torch.no_grad():
        found = learner._forward.logprobs(learner._model, batch).numpy()
        learner._forward._min_tokens = 0
        unbarred = learner._forward.logprobs(learner._model, batch).numpy()
    drawn = np.concatenate([one.logprobs for one in samples])
    np.testing.assert_allclose(drawn, found, atol=1e-4)
    assert np.abs(drawn - unbarred).max() > 1e-3, "the bar makes no difference: this test shows nothing"


def test_a_sample_that_moves_ends_at_the_same_token_with_the_same_bits(
    engine: RemoteEngine, spec: RunSpec, prompt: list[int]
) -> None:
    """Handed over at each of its tokens, so that a stop string lies over the boundary, too."""
    together = run(engine, [request(prompt, number) for number in range(64)])
    stopped = [name for name, one in together.items() if one.finish == "stop" and len(one.tokens) > 8][:6]
    for name in stopped:
        whole, asked = together[name], request(prompt, int(name[:7]))
        for cut in {1, LEAST, len(whole.tokens) - 2, len(whole.tokens) - 1}:
            moved = replace(asked, made=whole.tokens[:cut].tolist())
            rest = run(engine, [moved])[name]
            np.testing.assert_array_equal(np.concatenate([whole.tokens[:cut], rest.tokens]), whole.tokens)
            np.testing.assert_array_equal(rest.logprobs, whole.logprobs[cut:])
            assert rest.finish == "stop"
    assert stopped
    assert engine.hand_over(["0000099-00"]) == []

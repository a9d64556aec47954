"""The engine process and its other end: the same samples, weights between two steps, and no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from infra.weights.digest import digests_of
from producers.engines.base import EngineError, Finished, Request
from producers.engines.engine_process import EngineOptions
from producers.engines.remote import RemoteEngine
from tests.factories import make_tiny_model
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def options(model: Path) -> EngineOptions:
    return EngineOptions(
        model=str(model), dtype="float32", slots=8, max_model_len=256, temperature=1.0, kv_cache_mib=4,
        threads=1, batch_invariant=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RemoteEngine]:
    made = RemoteEngine(options(model), threading.Event(), deadline_s=120)
    made.wait_until_ready()
    made.install(save(weights(model)), recompute=False)
    yield made
    made.close()


def weights(model: Path, factor: float = 1.0) -> dict[str, torch.Tensor]:
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: factor * tensor.detach() for name, tensor in net.named_parameters()}


def request(number: int) -> Request:
    return Request(f"{number:07d}-00", [4 + number % 9, 5, 6], 8 + number % 40, 1000 + number, 1.0)


def run(engine: RemoteEngine, requests: list[Request]) -> dict[str, Finished]:
    found: dict[str, Finished] = {}
    for one in requests:
        engine.submit(one)

    def all_there() -> bool:
        found.update({finished.id: finished for finished in engine.step(0.2)})
        return len(found) == len(requests)

    wait_until(all_there, what=f"{len(requests)} samples")
    return found


def test_says_how_fast_it_is_before_it_has_work(engine: RemoteEngine) -> None:
    assert engine.pace().batches == [1, 8]


def test_makes_the_same_samples_again(engine: RemoteEngine) -> None:
    requests = [request(number) for number in range(60)]
    together = run(engine, requests)
    for one in requests[::9]:
        alone = run(engine, [one])[one.id]
        np.testing.assert_array_equal(alone.tokens, together[one.id].tokens)
        np.testing.assert_array_equal(alone.logprobs, together[one.id].logprobs)
        assert len(alone.logprobs) == len(alone.tokens) > 0


def test_says_what_it_holds_and_how_far_its_samples_are(engine: RemoteEngine, model: Path) -> None:
    for number in range(4):
        engine.submit(request(number))
    engine.abort([request(3).id, "0000099-00"])  # one that runs, and one that it never had
    changed = weights(model, 1.01)
    installed = engine.install(save(changed), recompute=False)
    assert installed.digests == digests_of(changed)
    assert set(installed.tokens) == {request(number).id for number in range(3)}
    found: dict[str, Finished] = {}

    def all_there() -> bool:
        found.update({finished.id: finished for finished in engine.step(0.2)})
        return len(found) == 3

    wait_until(all_there, what="the samples that went on with the new weights")
    assert all(len(found[name].tokens) >= tokens for name, tokens in installed.tokens.items())
    engine.install(save(weights(model)), recompute=False)


def test_its_death_is_an_error_and_not_a_wait(engine: RemoteEngine) -> None:
    """The last one that uses it."""
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended with status -9"):
        run(engine, [request(0)])


def test_it_ends_with_its_generator(model: Path) -> None:
    code = f"""
from tests.integration.test_remote_engine import Path, RemoteEngine, options, threading
engine = RemoteEngine(options(Path({str(model)!r})), threading.Event(), deadline_s=60)
print(engine.pid, flush=True)
engine.wait_until_ready()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until(lambda: not child.is_running(), what="the engine process's end")

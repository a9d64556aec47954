"""The engine process and its other end: the same samples, weights between two steps, and no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from infra.supervise.children import start_child
from infra.weights.digest import digests_of
from producers.engines import remote
from producers.engines.engine import DrawnAnswer, EngineError, Installed, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from schemas.messages import GeneratorReport, Sample
from tests.factories import make_context, make_patch, make_spec, make_tiny_model
from tests.generators import Running
from tests.unit.test_backlog import prompt
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def options(model: Path) -> EngineOptions:
    generator = {"slots": 8, "kv_cache_mib": 4}
    sampling = {"max_tokens": 200, "max_prompt_tokens": 56}
    spec = make_spec(generator=generator, sampling=sampling, trainer={"microbatch_tokens": 256})
    return EngineOptions(model=str(model), spec=spec.model_dump_json())


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine's temporary files are."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def engine(model: Path, temporary: Path) -> Iterator[RemoteEngine]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(temporary))
        made = RemoteEngine(options(model), threading.Event(), deadline_s=600).open()
    made.wait_until_ready()
    give(made, weights(model))
    yield made
    made.close()


def test_an_engine_that_stands_still_and_reads_no_orders_is_late(model: Path) -> None:
    engine = RemoteEngine(options(model), threading.Event(), deadline_s=1).open()
    try:
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="took more than 1 s to take orders"):
            for number in range(100):
                engine.submit(SampleRequest(f"{number:07d}-01", list(range(60_000)), 190, 0, 1.0))
                engine.step(0.0)
    finally:
        engine.close()


def weights(model: Path, factor: float = 1.0) -> dict[str, torch.Tensor]:
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: factor * tensor.detach() for name, tensor in net.named_parameters()}


def give(
    engine: RemoteEngine, tensors: dict[str, torch.Tensor], requests: Sequence[SampleRequest] = ()
) -> Installed:
    """Let it hold other weights, and have requests just before: not all of them for long."""
    engine.prepare(make_patch(tensors))
    wait_until(engine.is_ready, what="its being ready")
    for one in requests:
        engine.submit(one)
    if requests:
        engine.abort([requests[-1].id, "0000099-00"])  # one that runs, and one that it never had
    installed = engine.install(recompute=False)
    wait_until(engine.digests, what="what it holds")
    assert engine.digests() == digests_of(tensors)
    return installed


def request(number: int) -> SampleRequest:
    return SampleRequest(f"{number:07d}-00", [4 + number % 9, 5, 6], 8 + number % 40, 1000 + number, 1.0)


def run(engine: RemoteEngine, requests: list[SampleRequest]) -> dict[str, DrawnAnswer]:
    found: dict[str, DrawnAnswer] = {}
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
    installed = give(engine, weights(model, 1.01), [request(number) for number in range(4)])
    assert set(installed.tokens) == {request(number).id for number in range(3)}
    found: dict[str, DrawnAnswer] = {}

    def all_there() -> bool:
        found.update({finished.id: finished for finished in engine.step(0.2)})
        return len(found) == 3

    wait_until(all_there, what="the samples that went on with the new weights")
    assert all(len(found[name].tokens) >= tokens for name, tokens in installed.tokens.items())
    give(engine, weights(model))


def test_a_newer_version_takes_the_place_of_one_that_is_being_prepared(
    engine: RemoteEngine, model: Path
) -> None:
    for factor in (1.01, 1.02):
        engine.prepare(make_patch(weights(model, factor)))
    give(engine, weights(model))


def test_its_death_is_an_error_and_not_a_wait(engine: RemoteEngine, temporary: Path) -> None:
    """The last one that uses it. It leaves no file behind."""
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended with status -9"):
        run(engine, [request(0)])
    assert not list(temporary.iterdir())


def test_a_generator_publishes_nothing_of_an_engine_that_holds_other_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tampered(command: list[str], **how: Any) -> Any:
        return start_child([*command[:2], "tests.fakes.tampering", *command[3:]], **how)

    monkeypatch.setattr(remote, "start_child", tampered)
    bell = threading.Event()
    engine = RemoteEngine(options(model), bell, deadline_s=600).open()
    engine.wait_until_ready()
    context = make_context(make_spec(generator={"slots": 2}), tmp_path, role="generator")
    running = Running(context, engine, bell)
    try:
        running.announce(0, weights(model))
        running.assign(prompt(0, tokens=np.array([4, 5], np.int32)))
        wait_until(lambda: len(running.read("samples", Sample)) == 2, what="the samples of version 0")
        running.assign(prompt(1, tokens=np.array([4, 6], np.int32), min_version=1, iteration=1))
        running.announce(1, weights(model, 1.01))
        wait_until(lambda: running.ended, what="its end")
    finally:
        running.stop()
    (error,) = running.ended
    assert "does not hold version 1: model.layers.0.self_attn.k_proj.weight differ (1 of" in str(error)
    assert [sample.versions.tolist() for sample in running.read("samples", Sample)] == [[0], [0]]
    report = running.read("generators", GeneratorReport)[-1]
    assert report.leaving and set(report.groups.tolist()) == {1} and report.tokens.max() > 0


def test_it_ends_with_its_generator(model: Path) -> None:
    code = f"""
from tests.integration.test_remote_engine import Path, RemoteEngine, options, threading
engine = RemoteEngine(options(Path({str(model)!r})), threading.Event(), deadline_s=600).open()
print(engine.pid, flush=True)
engine.wait_until_ready()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until(lambda: not child.is_running(), what="the engine process's end")

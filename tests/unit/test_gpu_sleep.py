"""An engine on a GPU sleeps while it rests, by vLLM's sleep mode; here by a stand-in for vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from producers.engines.engine import SleepingEngine
from producers.engines.in_flight import InFlight
from producers.engines.vllm_engine import VllmSettings
from producers.engines.vllm_in_process import GpuMemory, VllmEngine
from tests.factories import make_spec


class Called(SimpleNamespace):
    """Notes what is called on it."""

    def __init__(self) -> None:
        core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=None, scheduler=None))
        super().__init__(calls=[], engine_core=core)

    def sleep(self, **options: Any) -> None:
        self.calls.append(("sleep", options))

    def wake_up(self) -> None:
        self.calls.append(("wake_up", {}))


@pytest.mark.parametrize("sleeps", [True, False])
def test_it_sleeps_only_where_that_frees_a_gpu(sleeps: bool) -> None:
    engine, vllm = VllmEngine.__new__(VllmEngine), Called()
    engine._engine, engine._sleeps, engine._in_flight = vllm, sleeps, InFlight(vllm)
    assert isinstance(engine, SleepingEngine)
    engine.sleep()
    engine.wake()
    # running samples are kept: level 1 drops their KV cache, and they are prefilled again
    expected = [("sleep", {"level": 1, "mode": "keep"}), ("wake_up", {})]
    assert vllm.calls == (expected if sleeps else [])


@pytest.mark.parametrize(
    ("placement", "generator", "expected"),
    [
        ({}, {}, {"enable_sleep_mode": False}),
        ({}, {"gpu_memory": 0.7}, {"enable_sleep_mode": False, "gpu_memory_utilization": 0.7}),
        ({"share_gpus": True}, {}, {"enable_sleep_mode": False}),
        ({"kind": "colocated"}, {}, {"enable_sleep_mode": True, "gpu_memory_utilization": 0.45}),
        (
            {"kind": "colocated"},
            {"gpu_memory": 0.3},
            {"enable_sleep_mode": True, "gpu_memory_utilization": 0.3},
        ),
    ],
)  # fmt: skip
def test_memory_is_shared_with_the_learner_in_a_colocated_run(
    placement: dict[str, Any], generator: dict[str, Any], expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given: dict[str, Any] = {}

    class Stub:
        def __init__(self, model: str, **options: Any) -> None:
            given.update(options)

    monkeypatch.setattr("producers.engines.vllm_in_process.VllmEngine", Stub)
    monkeypatch.setattr("producers.stopping.stopping_of", lambda model, spec: None)
    spec = make_spec(placement=placement, generator=generator).with_code("generator")
    assert isinstance(spec.generator, VllmSettings)
    spec.generator.own_engine("model", spec)
    gpu = given["gpu"]
    assert isinstance(gpu, GpuMemory) and gpu.arguments() == expected
    assert bool(gpu.ahead) == (not placement)  # what is free is the learner's where it may take it

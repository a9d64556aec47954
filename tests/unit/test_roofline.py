"""The roofline: more of anything never makes it worse, memory is respected, and measured curves are near."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.planning.hardware import HARDWARE, Hardware, HardwareError, hardware_of
from flows.planning.model_shape import shape_of
from flows.planning.roofline import (
    BudgetError,
    Efficiency,
    Precision,
    Recipe,
    RooflineEngine,
    engine_times,
    fewest_devices,
    learner_times,
)  # fmt: skip
from flows.planning.serving import serving_times
from tests.bench._paper_figures import CONFIGS, STEP_MS

SHAPES = {name: shape_of(config) for name, config in CONFIGS.items()}
H800 = hardware_of("H800")
VLLM_OF_THE_PAPER = Efficiency(layer_s=120e-6)

fitting = st.sampled_from([(name, devices) for name in SHAPES for devices in (4, 8)])
batches = st.integers(1, 512)


@given(fitting, batches, batches)
def test_a_larger_batch_is_never_faster_and_always_cheaper(
    which: tuple[str, int], one: int, other: int
) -> None:
    engine = RooflineEngine(SHAPES[which[0]], H800, which[1])
    small, large = sorted((one, other))
    assert engine.batch_s(small) <= engine.batch_s(large)
    assert engine.batch_s(small) / small >= engine.batch_s(large) / large


@given(st.sampled_from(sorted(SHAPES)), batches)
def test_more_devices_read_fewer_weights_and_hold_more_tokens(name: str, batch: int) -> None:
    few, many = RooflineEngine(SHAPES[name], H800, 4), RooflineEngine(SHAPES[name], H800, 8)
    assert many.read_s(batch) < few.read_s(batch)
    assert many.kv_tokens() > few.kv_tokens()
    assert many.context_s() <= few.context_s()
    assert many.prefill_s(512) < few.prefill_s(512)


@given(fitting, st.integers(256, 30_000), st.one_of(st.none(), st.integers(1, 700)))
def test_slots_fit_into_memory(which: tuple[str, int], longest: int, slots: int | None) -> None:
    shape = SHAPES[which[0]]
    try:
        times = engine_times(shape, H800, devices=which[1], longest=longest, slots=slots)
    except BudgetError:
        assert RooflineEngine(shape, H800, which[1]).kv_tokens() < longest
        return
    assert times.slots * longest <= RooflineEngine(shape, H800, which[1]).kv_tokens()
    assert slots is None or times.slots <= slots
    assert list(times.batch_s) == sorted(times.batch_s)
    assert times.batch_s[0] == times.batch_s[1]


def test_the_papers_own_curve_is_met_at_a_context_of_1500() -> None:
    """Figure 6 of the paper: 7B on one H800, by vLLM. It does not say the context."""
    engine = RooflineEngine(SHAPES["7B"], H800, efficiency=VLLM_OF_THE_PAPER)
    for batch, ms in STEP_MS.items():
        assert engine.step_s(batch, 1500) * 1000 == pytest.approx(ms, rel=0.08)


@pytest.mark.parametrize("devices", [0, 1])
def test_a_model_that_does_not_fit_is_named(devices: int) -> None:
    with pytest.raises(BudgetError, match=r"Qwen2\.5-72B"):
        RooflineEngine(SHAPES["72B"], H800, devices)


def test_the_error_says_how_many_devices_it_takes() -> None:
    with pytest.raises(BudgetError, match="It takes 2 devices"):
        RooflineEngine(SHAPES["72B"], H800, 1)
    assert fewest_devices(SHAPES["72B"], H800) == 2
    assert fewest_devices(SHAPES["7B"], H800) == 1
    assert RooflineEngine(SHAPES["72B"], H800, 1, Precision(weights=1.0)).kv_tokens() > 0


def test_a_sample_that_does_not_fit_beside_the_weights_is_named() -> None:
    with pytest.raises(BudgetError, match="no sample of 10000000 tokens"):
        engine_times(SHAPES["7B"], H800, longest=10_000_000)
    with pytest.raises(BudgetError, match="at least one"):
        engine_times(SHAPES["7B"], H800, slots=0)


def test_training_that_does_not_fit_is_named() -> None:
    ppo = Recipe(trained=2, scored=1)
    with pytest.raises(BudgetError, match="take 36 devices"):
        learner_times(SHAPES["72B"], H800, devices=8, recipe=ppo)
    learner_times(SHAPES["72B"], H800, devices=36, recipe=ppo)
    learner_times(SHAPES["72B"], H800, devices=20, recipe=replace(ppo, offloaded=True))


@settings(deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.integers(5, 8), st.integers(200, 20_000))
def test_training_scales_with_devices_models_and_length(name: str, power: int, length: int) -> None:
    few = learner_times(SHAPES[name], H800, devices=2**power, length=length)
    many = learner_times(SHAPES[name], H800, devices=2 ** (power + 1), length=length)
    both = learner_times(
        SHAPES[name], H800, devices=2 ** (power + 1), length=length, recipe=Recipe(trained=2)
    )
    longer = learner_times(SHAPES[name], H800, devices=2**power, length=2 * length)
    assert few.token_s == pytest.approx(2 * many.token_s)
    assert both.token_s == pytest.approx(few.token_s)
    assert longer.token_s > few.token_s
    assert few.version_bytes == 2 * SHAPES[name].parameters


def test_training_takes_six_flops_a_parameter() -> None:
    shape = SHAPES["7B"]
    times = learner_times(shape, H800, devices=8, length=0)
    assert times.token_s * 8 * H800.bf16_flops * 0.4 == pytest.approx(6 * shape.active_parameters)


def test_a_delta_sends_its_share() -> None:
    whole, delta = (learner_times(SHAPES["7B"], H800, devices=8, sent_share=share) for share in (1, 0.025))
    assert delta.version_bytes == pytest.approx(whole.version_bytes * 0.025)
    assert delta.publish_s == pytest.approx(whole.publish_s * 0.025)


def test_unknown_hardware_is_named_with_those_known() -> None:
    with pytest.raises(HardwareError, match=r"'B9000' is unknown: known are H800, .*CPU"):
        hardware_of("B9000")
    mine = Hardware("B9000", 1e15, 1e11, 1e12, 1e11, 1e10)
    assert hardware_of("B9000", {"B9000": mine}) is mine


@pytest.mark.parametrize("field", ["bf16_flops", "memory_bytes", "memory_bytes_per_s", "price"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_hardware_that_cannot_exist_is_named(field: str, value: float) -> None:
    with pytest.raises(HardwareError, match=field):
        replace(H800, **{field: value})


def test_the_papers_hardware_is_in_the_table() -> None:
    assert HARDWARE["H20"].bf16_flops == 148e12
    assert HARDWARE["H800"].price == 2.85
    assert HARDWARE["H800"].memory_bytes_per_s == 3.35e12


@given(st.integers(1, 256), st.integers(1, 256), st.booleans())
def test_more_requests_in_flight_never_shorten_a_token(one: int, other: int, prefill_first: bool) -> None:
    engine = RooflineEngine(SHAPES["7B"], H800)
    small, large = (
        serving_times(engine, prompt=512, answer=256, in_flight=count, prefill_first=prefill_first)
        for count in sorted((one, other))
    )
    assert small.token_s <= large.token_s
    assert small.first_token_s <= large.first_token_s


def test_requests_that_do_not_fit_wait_for_a_slot() -> None:
    engine = RooflineEngine(SHAPES["32B"], H800)
    times = serving_times(engine, prompt=8000, answer=2000, in_flight=64)
    assert times.running < 64
    assert times.first_token_s > 2000 * times.token_s
    with pytest.raises(BudgetError, match="at least 1"):
        serving_times(engine, prompt=0, answer=1, in_flight=1)

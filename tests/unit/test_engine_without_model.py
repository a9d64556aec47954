"""The engine without a model says truly when it has something to give."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.weights.patch import PatchFile
from producers.engines.engine import SampleRequest
from producers.engines.without_model import ReplayEngine, VirtualClock


def test_a_sample_that_ended_while_another_was_asked_for_is_due_at_once() -> None:
    clock = VirtualClock()
    engine = ReplayEngine(np.ones(3), lambda request: 5, clock)
    engine.submit(SampleRequest("a", [1], 10, 0, 0.0, []))
    assert engine.next_end() == 5.0
    clock.time = 6.0
    assert engine.hand_over(["a"]) == [], "it is done, and is not handed over"
    assert engine.next_end() == 6.0
    assert [one.id for one in engine.step(0.0)] == ["a"]
    assert math.isinf(engine.next_end())


def replay(
    samples: Sequence[tuple[int, int]],
    *,
    slots: int = 4,
    context_s: float = 0.0,
    prefill_s: float = 0.0,
    fill_s: float = 0.0,
) -> tuple[ReplayEngine, VirtualClock]:
    """An engine with samples of these prompts and lengths, the first one first."""
    clock = VirtualClock()
    lengths = {str(number): length for number, (_, length) in enumerate(samples)}
    engine = ReplayEngine(
        np.linspace(0.01, 0.03, slots + 1), lambda request: lengths[request.id], clock, context_s=context_s,
        prefill_s=prefill_s, fill_s=fill_s, install_s=2.0,
    )  # fmt: skip
    for number, (prompt, _) in enumerate(samples):
        engine.submit(SampleRequest(str(number), [0] * prompt, 1000, 0, -number, []))
    return engine, clock


def ends_of(engine: ReplayEngine, clock: VirtualClock) -> dict[str, float]:
    """When each sample ends."""
    found: dict[str, float] = {}
    while (at := engine.next_end()) < math.inf:
        clock.time = max(at, clock.time)
        found |= {one.id: clock.time for one in engine.step(0.0)}
    return found


def step_by_step(
    samples: Sequence[tuple[int, int]], *, slots: int, context_s: float, prefill_s: float, fill_s: float
) -> dict[str, float]:
    """The same, by making each step."""
    seconds, now = np.linspace(0.01, 0.03, slots + 1), 0.0
    waiting, running, found = list(enumerate(samples)), {}, {}
    while waiting or running:
        now += fill_s if waiting and len(running) < slots else 0.0
        while waiting and len(running) < slots:
            number, (prompt, length) = waiting.pop(0)
            running[number] = [prompt, length]
            now += prefill_s * prompt
        now += seconds[len(running)] + context_s * sum(attended for attended, _ in running.values())
        for number, state in list(running.items()):
            state[0], state[1] = state[0] + 1, state[1] - 1
            if not state[1]:
                found[str(number)] = now
                del running[number]
    return found


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 60)), min_size=1, max_size=12),
    st.integers(1, 5), st.floats(0, 1e-3), st.floats(0, 1e-2), st.floats(0, 1e-2),
)  # fmt: skip
def test_steps_that_attend_to_more_and_more_take_as_long_as_one_by_one(
    samples: list[tuple[int, int]], slots: int, context_s: float, prefill_s: float, fill_s: float
) -> None:
    times = {"slots": slots, "context_s": context_s, "prefill_s": prefill_s, "fill_s": fill_s}
    assert ends_of(*replay(samples, **times)) == pytest.approx(step_by_step(samples, **times), rel=1e-9)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 60)), min_size=1, max_size=6),
    st.lists(st.tuples(st.floats(0.01, 1.0), st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=6),
)  # fmt: skip
def test_an_engine_whose_speed_changes_does_the_same_work(
    samples: list[tuple[int, int]], changes: list[tuple[float, float]]
) -> None:
    """The work done until a moment is the integral of the speed; each sample ends at the same work."""
    times = {"context_s": 1e-4, "prefill_s": 1e-3}
    work = ends_of(*replay(samples, **times))
    engine, clock = replay(samples, **times)
    found: dict[str, float] = {}  # the work at which each sample ended
    speed, done = 1.0, 0.0
    for seconds, then in [*changes, (0.1, 1.0)]:
        until = clock.time + seconds
        while (at := engine.next_end()) <= until:
            done += max(0.0, at - clock.time) * speed
            clock.time = max(at, clock.time)
            found |= {one.id: done for one in engine.step(0.0)}
        done += (until - clock.time) * speed
        clock.time = until
        engine.set_speed(then)
        speed = then
    began = clock.time
    found |= {name: done + at - began for name, at in ends_of(engine, clock).items()}
    assert found == pytest.approx(work, rel=1e-6)


def test_an_engine_stands_still_to_prefill_and_to_install() -> None:
    engine, clock = replay([(100, 10)], prefill_s=0.01)
    assert engine.standing_still() == pytest.approx((0.0, 1.0))
    for root in ("first", "second"):  # the first weights replace none
        engine.prepare(PatchFile({}, {}, since=None, root=root))
        engine.install(recompute=False)
    assert engine.standing_still() == pytest.approx((2.0, 1.0))
    clock.time = 2.5
    engine.unfinished()
    assert engine.standing_still() == pytest.approx((0.0, 0.5))
    engine.set_speed(0.5)
    assert engine.standing_still() == pytest.approx((0.0, 1.0))
    assert engine.next_end() == pytest.approx(2.5 + 1.0 + 10 * 0.015 / 0.5)
    engine.set_speed(0.0)
    assert math.isinf(engine.next_end())


def test_a_request_that_comes_late_begins_a_step_later_and_with_a_step() -> None:
    clock = VirtualClock()
    lengths = {"a": 4, "b": 2, "c": 3}
    engine = ReplayEngine(np.ones(4), lambda request: lengths[request.id], clock, late_steps=1.0)
    engine.submit(SampleRequest("a", [1], 10, 0, 0.0, []))  # nothing is drawn: it begins at once
    engine.submit(SampleRequest("b", [1], 10, 0, 0.0, []))
    clock.time = 2.0
    assert [one.id for one in engine.step(0.0)] == ["b"]
    engine.submit(SampleRequest("c", [1], 10, 0, 0.0, []))  # it misses a step
    clock.time = 4.0
    assert [one.id for one in engine.step(0.0)] == ["a"]
    assert engine.next_end() == 6.0
    clock.time = 6.0
    assert [one.id for one in engine.step(0.0)] == ["c"]
    clock.time = 6.5
    engine.submit(SampleRequest("a", [1], 10, 0, 0.0, []))  # it stood still
    assert engine.next_end() == 10.5

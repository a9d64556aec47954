"""The engine without a model says truly when it has something to give."""

from __future__ import annotations

import math

import numpy as np

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

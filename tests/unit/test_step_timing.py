"""Timed decode steps: what was in each is told from the tokens before and after."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flows.planning.measuring_engine import Cell, cell_points, grid, real_points, real_requests
from infra import core_waits
from producers.engines.engine import Pace, SampleRequest
from producers.engines.step_timing import StepTable, TimedDraw, draw_timed
from producers.engines.without_model import ReplayEngine, VirtualClock
from producers.first_prompts import FirstPrompt
from tests.factories import make_spec


class SteppingEngine(ReplayEngine):
    """Makes one step of virtual time whenever it is asked to."""

    def __init__(self, lengths: dict[str, int], slots: int) -> None:
        self.clock = VirtualClock()
        super().__init__(np.full(slots + 1, 1.0), lambda request: lengths[request.id], self.clock)

    def step(self, wait_s: float) -> list:  # type: ignore[type-arg]
        self.clock.time += 1.0
        return super().step(0.0)


def requests(lengths: dict[str, int], prompt: int = 5) -> list[SampleRequest]:
    return [SampleRequest(name, [0] * prompt, 100, 0, 0.0) for name in lengths]


def order(lengths: dict[str, int], **changes: float) -> TimedDraw:
    values = {"slots": 2, "most_s": 60.0, "most_steps": 1000} | changes
    return TimedDraw(requests=requests(lengths), **values)  # type: ignore[arg-type]


def test_each_step_says_what_was_in_it() -> None:
    lengths = {"a": 2, "b": 3, "c": 1}
    table, answers = draw_timed(SteppingEngine(lengths, 2), order(lengths))
    assert table.samples == [2, 2, 2]
    assert table.begun == [2, 0, 1]  # a and b; then c, in the slot that a has left
    assert table.prompt == [10, 0, 5]
    assert table.context == [10, 12, 12]
    assert table.ended == [0, 1, 2]
    assert len(table.seconds) == len(table.waited) == 3
    assert min(table.seconds) > 0
    assert sorted((one.id, len(one.tokens), one.finish) for one in answers) == [
        ("a", 2, "stop"), ("b", 3, "stop"), ("c", 1, "stop"),
    ]  # fmt: skip


def test_tokens_that_others_computed_are_left_out_of_prompts() -> None:
    """Also where the engine says it a step before a sample's first token is there."""

    class Sharing(SteppingEngine):
        found = 100  # in draws before

        def submit(self, request: SampleRequest) -> None:
            super().submit(request)
            self.found += 3

        def pace(self) -> Pace:
            return replace(super().pace(), shared=self.found)

    lengths = {"a": 2, "b": 3, "c": 1}
    table, _ = draw_timed(Sharing(lengths, 2), order(lengths))
    assert table.prompt == [10 - 6, 0, 5 - 3]


def test_samples_that_are_left_are_handed_over_as_they_are() -> None:
    lengths = {"a": 50, "b": 50}
    engine = SteppingEngine(lengths, 2)
    table, answers = draw_timed(engine, order(lengths, most_steps=4))
    assert len(table.seconds) == 4
    assert [(one.id, len(one.tokens), one.finish) for one in answers] == [("a", 4, ""), ("b", 4, "")]
    assert engine.unfinished() == {}


def test_the_engine_looks_for_orders_at_each_step() -> None:
    looks: list[int] = []
    lengths = {"a": 3}
    draw_timed(SteppingEngine(lengths, 2), order(lengths), lambda: looks.append(1))
    assert len(looks) == 3


def test_waits_for_a_core_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [100.0], [7.0]
    monkeypatch.setattr(core_waits.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(core_waits, "waited_for_core_s", lambda: waits[0])
    watch = core_waits.WorkWatch()
    now[0], waits[0] = 103.0, 9.0
    assert watch.end() == core_waits.WorkTime(1.0, 2.0)
    watch.begin()
    now[0], waits[0] = 104.0, 99.0  # a clock of another kind never makes it negative
    assert watch.end().seconds > 0
    assert watch.disturbed == pytest.approx(0.75)


def test_this_thread_has_waited_for_a_core_some_time() -> None:
    assert 0 <= core_waits.waited_for_core_s() < 1e6


def test_a_grid_has_the_ends_first_and_batches_between_held_out() -> None:
    cells = grid(256, 248, 0, 1_000_000)
    assert cells[:2] == [Cell(256, 8), Cell(256, 216)]
    assert {one.samples for one in cells if not one.held_out} == {1, 4, 16, 64, 256}
    assert {one.samples for one in cells if one.held_out} == {2, 8, 32, 128}


@pytest.mark.parametrize(("slots", "longest"), [(1, 4), (2, 40), (3, 5000), (256, 100_000)])
@pytest.mark.parametrize("memory", [0, 2000, 100_000])
def test_a_grid_fits_into_memory_and_time(slots: int, longest: int, memory: int) -> None:
    cells = grid(slots, longest, memory, 30_000)
    assert len(set(cells)) == len(cells) >= 1
    for one in cells:
        assert 1 <= one.samples <= slots
        assert 1 <= one.context <= longest
        assert one.context <= 8 or one.context * one.samples <= 30_000
        assert not memory or one.context <= 8 or one.samples * one.context <= memory


def table_of(seconds: list[float], waited: list[float] | None = None) -> StepTable:
    count = len(seconds)
    return StepTable(
        samples=[4] * count, context=[40] * count, begun=[4] + [0] * (count - 1),
        prompt=[20] + [0] * (count - 1), ended=[0] * count, seconds=seconds, waited=waited or [0.0] * count,
    )  # fmt: skip


def test_the_prefill_and_the_first_steps_are_no_steps_of_the_grid() -> None:
    steps, prefill = cell_points([table_of([9.0, 5.0, 5.0, 5.0, *[1.0] * 10])], held_out=True)
    assert steps.seconds == 1.0
    assert (steps.begun, steps.prompt, steps.steps, steps.held_out) == (0.0, 0.0, 10, True)
    assert (prefill.seconds, prefill.begun, prefill.prompt, prefill.steps) == (9.0, 4.0, 20.0, 1)


def test_steps_that_waited_or_are_far_off_are_left_out() -> None:
    seconds = [9.0, *[1.0] * 3, *[1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.02] * 2, 50.0, 3.0, 3.0]
    waited = [0.0] * (len(seconds) - 2) + [2.0, 2.0]
    steps, _ = cell_points([table_of(seconds, waited)], held_out=False)
    assert steps.seconds == pytest.approx(1.0, rel=0.01)
    assert steps.steps == 16


def test_where_all_steps_waited_the_calmer_half_counts() -> None:
    seconds, waited = [9.0, *[1.0] * 3, *[1.0, 2.0] * 6], [0.0] * 4 + [0.5, 1.8] * 6
    steps, _ = cell_points([table_of(seconds, waited)], held_out=False)
    assert steps.seconds == 1.0


def test_points_of_real_prompts_are_of_steps_alike() -> None:
    table = table_of([1.0] * 24 + [2.0] * 24)
    table.samples = [2] * 24 + [8] * 24
    found = real_points(table)
    assert [(one.samples, one.seconds) for one in found] == [(2, 1), (2, 1), (8, 2), (8, 2)]
    assert real_points(table_of([])) == []


def test_real_requests_are_those_of_a_run() -> None:
    spec = make_spec()
    prompts = [FirstPrompt("one", "{}", [1, 2]), FirstPrompt("two", "{}", [3])]
    found = real_requests(prompts, spec)
    assert [one.prompt for one in found] == [[1, 2], [1, 2], [3], [3]]
    assert len({one.id for one in found}) == len({one.seed for one in found}) == 4
    assert not any(one.endless for one in found)

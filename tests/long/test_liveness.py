"""A slow run is not a dead one: what takes longer than the deadline goes on, and what is stuck ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra import waiting
from infra.bus import read_all
from infra.liveness import Evidence, Pulses, Pulsing
from infra.roles.context import RoleContext
from infra.roles.heart import Heart
from infra.waiting import Wait, WaitedTooLong
from producers.drawing import Drawing
from producers.engines.without_model import RealClock, ReplayEngine
from schemas.messages import Heartbeat, Pulse
from schemas.wire import encode
from tests.factories import make_context, make_spec
from tests.fakes.fill import fill
from tests.generators import Running
from tests.unit.test_backlog import prompt
from tests.waiting import wait_until

DEADLINE_S = 600.0
SHORT_S = 2.0


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def beat(role: str, number: int = 0, **fields: Any) -> Heartbeat:
    given: dict[str, Any] = {"run": "test-1", "host": "h", "pid": 7, "state": "working", "sent_at": 1.0}
    return fill(Heartbeat, role=role, number=number, **(given | fields))


class World:
    """Processes on a fake clock, heard every two seconds."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.evidence = Evidence(self.clock)

    def passes(self, seconds: float, beats: Callable[[float], list[Heartbeat]]) -> None:
        for _ in range(int(seconds / 2)):
            self.clock.now += 2.0
            for one in beats(self.clock.now):
                self.evidence.heard(one)
            self.evidence.tick()


IDLE = {"waits_for": "assignments", "unblocked_by": "feeder", "state": "waiting"}


def test_a_step_of_forty_minutes_moves_by_its_processor_while_all_others_wait() -> None:
    world = World()
    world.passes(2400, lambda now: [
        beat("trainer", state="training", counters={"cpu_s": now, "step": 3.0}),
        beat("generator", counters={"cpu_s": now * 0.01, "tokens": 9.0}, **IDLE),
    ])  # fmt: skip
    assert world.evidence.still_s <= 4.0
    assert world.evidence.moved == "trainer-0: training"


def test_outputs_that_grow_for_an_hour_move_though_no_sample_ends() -> None:
    world = World()
    world.passes(3600, lambda now: [
        beat("generator", state="generating", counters={"drawn": float(int(now / 60)), "cpu_s": 1.0}),
    ])  # fmt: skip
    assert world.evidence.still_s <= 60.0


@pytest.mark.parametrize(
    "stuck",
    [
        # waiting, whatever its threads use
        lambda now: beat("trainer", waits_for="samples", unblocked_by="generators", counters={"cpu_s": now}),
        # it says that it works, and does nothing
        lambda now: beat("trainer", state="training", counters={"cpu_s": 5.0 + now * 0.02, "step": 3.0}),
        # its counters go up and down, or count seconds and what goes wrong
        lambda now: beat("trainer", state="training", counters={
            "queued": now // 2 % 2, "idle_s": now, "busy_s": now, "dead_letters": now, "duplicates": now}),
        lambda now: beat("feeder", state="admitting", counters={"cpu_s": now}),
    ],
)  # fmt: skip
def test_a_stuck_run_is_still_from_the_moment_on_when_nothing_moves(
    stuck: Callable[[float], Heartbeat],
) -> None:
    world = World()
    world.passes(20, lambda now: [beat("trainer", counters={"step": now})])
    assert world.evidence.still_s <= 2.0
    world.passes(620, lambda now: [stuck(now), beat("generator", counters={"tokens": 9.0}, **IDLE)])
    assert DEADLINE_S < world.evidence.still_s <= 622.0
    assert "generator-0 waits for assignments ← feeder" in world.evidence.waits()


def test_a_machine_that_slept_and_a_process_that_was_stopped_were_not_waiting() -> None:
    world = World()
    world.passes(10, lambda now: [beat("generator", **IDLE)])
    world.clock.now += 8 * 3600
    world.evidence.tick()
    assert world.evidence.still_s <= 20.0


def test_those_who_wait_for_the_same_are_named_together_and_the_silent_are_said_to_be() -> None:
    world = World()
    world.passes(20, lambda now: [beat("relay")])
    world.passes(60, lambda now: [
        *(beat("generator", number, pid=number, **IDLE) for number in range(100)),
        beat("trainer", state="waiting", waits_for="8 samples of iteration 3", unblocked_by="generators"),
    ])  # fmt: skip
    said = world.evidence.waits()
    assert "generator-0 and 99 more generator: waits for assignments ← feeder" in said
    assert "trainer-0 waits for 8 samples of iteration 3 ← generators" in said
    assert "relay-0 is silent" in said and len(said) < 2000


def test_memory_is_flat_however_many_processes_come_and_go() -> None:
    world = World()
    for number in range(10_000):
        world.clock.now += 0.01
        world.evidence.heard(
            beat("generator", number, pid=number, counters={f"c{n}": 1.0 for n in range(70)})
        )
    assert len(world.evidence._seen) <= 4096
    assert max(len(seen.best) for seen in world.evidence._seen.values()) <= 64


class Told:
    """Signs that a test sets."""

    def __init__(self) -> None:
        self.still, self.said = math.inf, ""

    def still_s(self) -> float:
        return self.still

    def waits(self) -> str:
        return self.said

    def close(self) -> None: ...


def waited(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, Told, Wait]:
    clock, told = Clock(), Told()
    monkeypatch.setattr(waiting.time, "monotonic", clock)
    return clock, told, Wait("samples", unblocked_by="the generators", deadline_s=DEADLINE_S, signs=told)


def test_a_wait_goes_on_while_anything_moves_and_ends_within_the_deadline_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, told, wait = waited(monkeypatch)
    for _ in range(2400):
        clock.now, told.still = clock.now + 1.0, 3.0
        wait.check()
    told.said, stopped = "trainer-0 waits for samples ← generators", clock.now
    with pytest.raises(WaitedTooLong, match=r"for samples .* Nothing moves anywhere: trainer-0 waits for"):
        while True:
            clock.now, told.still = clock.now + 1.0, told.still + 1.0
            wait.check()
    assert DEADLINE_S - 5 <= clock.now - stopped <= DEADLINE_S + 5


def test_a_wait_that_nobody_looked_at_for_hours_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, _, wait = waited(monkeypatch)
    clock.now += 5 * 3600
    wait.check()
    with pytest.raises(WaitedTooLong):
        for _ in range(700):
            clock.now += 1.0
            wait.check()


def short(folder: Path, role: str = "generator", **sections: Any) -> RoleContext:
    """A context whose deadline is two seconds."""
    return make_context(make_spec(deadlines={"progress_s": SHORT_S}, **sections), folder, role=role)


@pytest.fixture
def pulsing(tmp_path: Path) -> Iterator[tuple[RoleContext, Pulsing]]:
    context = short(tmp_path)
    heard = Pulsing(context.bus, context.writer, context.topics, context.run, deadline_s=SHORT_S).open()
    yield context, heard
    heard.close()


def test_pulses_come_though_there_is_always_one_more_heartbeat(tmp_path: Path) -> None:
    context, heart = short(tmp_path), Heart("test-1", "generator", 0)

    class Endless:
        def poll(self, wait_s: float) -> list[Any]:
            heart.beat(context.writer, context.topics)
            return context.bus.log(context.topics.status)[0][-1:]  # type: ignore[attr-defined,no-any-return]

    heard = Pulsing(context.bus, context.writer, context.topics, context.run, deadline_s=SHORT_S).open()
    heard._reader = Endless()  # type: ignore[assignment]
    log = context.bus.log(context.topics.pulse)[0]  # type: ignore[attr-defined]
    wait_until(lambda: len(log) > 2, what="three pulses", deadline_s=20)
    heard.close()


class Moving:
    """A process beside the one under test, that moves until it is told to stop."""

    def __init__(self, context: RoleContext, role: str) -> None:
        self._context, self._heart = context, Heart(context.run, role, 9)
        self._heart.working("training")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self._heart.counters["moved"] = self._heart.counters.get("moved", 0) + 1
            self._heart.beat(self._context.writer, self._context.topics)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def test_pulses_carry_movement_to_every_wait_until_nothing_moves(
    pulsing: tuple[RoleContext, Pulsing],
) -> None:
    context, _ = pulsing
    pulses = Pulses(context.bus, context.topics, context.run, deadline_s=SHORT_S).open()
    moving = Moving(context, "trainer")
    wait = Wait("weights 7", unblocked_by="trainer", deadline_s=SHORT_S, signs=pulses)
    until = time.monotonic() + 3 * SHORT_S
    while time.monotonic() < until:
        wait.check()
        context.stop.wait(0.02)
    moving.stop()
    began = time.monotonic()
    with pytest.raises(WaitedTooLong, match=r"weights 7 .*Nothing moves anywhere: trainer-9 says that it is"):
        wait_until(wait.check, what="the deadline", deadline_s=10)
    assert time.monotonic() - began < 3 * SHORT_S
    pulses.close()


def test_when_the_feeder_dies_the_deadline_runs_from_its_last_pulse(tmp_path: Path) -> None:
    context = short(tmp_path)
    pulses = Pulses(context.bus, context.topics, context.run, deadline_s=SHORT_S).open()
    pulse = fill(Pulse, run=context.run, still_s=0.0, waits="all is well", sent_at=1.0)
    context.writer.send(context.topics.pulse, encode(pulse), key="k")
    context.writer.send(context.topics.pulse, b"garbage", key="k")
    wait_until(lambda: pulses.still_s() < math.inf, what="the pulse")
    wait = Wait("assignments", unblocked_by="the feeder", deadline_s=SHORT_S, signs=pulses)
    with pytest.raises(WaitedTooLong, match="waited 2 s for assignments"):
        wait_until(wait.check, what="the deadline", deadline_s=10)
    pulses.close()


def test_what_ends_the_thread_that_hears_is_raised_by_the_next_wait(tmp_path: Path) -> None:
    context = short(tmp_path)

    class Broken:
        def poll(self, wait_s: float) -> list[Any]:
            raise RuntimeError("the reader broke")

    pulses = Pulses(context.bus, context.topics, context.run, deadline_s=SHORT_S).open()
    pulses._reader = Broken()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="the reader broke"):
        wait_until(lambda: pulses.still_s() < 0, what="the error", deadline_s=10)


def test_a_generator_that_is_idle_for_many_deadlines_goes_on_while_the_trainer_works(
    pulsing: tuple[RoleContext, Pulsing],
) -> None:
    context, _ = pulsing
    context.signs = Pulses(context.bus, context.topics, context.run, deadline_s=SHORT_S).open()
    moving, bell = Moving(context, "trainer"), threading.Event()
    engine = ReplayEngine(np.full(3, 0.01), lambda request: 4, RealClock(bell))
    running = Running(context, engine, bell)
    try:
        until = time.monotonic() + 3 * SHORT_S
        wait_until(lambda: running.ended or time.monotonic() > until, what="three deadlines")
        assert not running.ended
        moving.stop()
        wait_until(lambda: running.ended, what="its end", deadline_s=10)
        assert isinstance(running.ended[0], WaitedTooLong)
        assert "waited 2 s for work" in str(running.ended[0])
    finally:
        moving.stop()
        running.stop()
        context.signs.close()


def test_the_feeder_sends_small_pulses_whatever_the_number_of_generators(
    pulsing: tuple[RoleContext, Pulsing],
) -> None:
    context, _ = pulsing
    for number in range(1000):
        heart = Heart(context.run, "generator", number)
        heart.waiting("assignments", unblocked_by="feeder")
        heart.beat(context.writer, context.topics)
    found: list[bytes] = []

    def told() -> bool:
        records = read_all(context.bus, context.topics.pulse, deadline_s=5)
        found[:] = [record.value for record in records if b"999 more generator" in record.value]
        return bool(found)

    wait_until(told, what="a pulse that has heard of all")
    assert max(map(len, found)) < 600


def test_a_reward_that_waits_for_long_is_movement(tmp_path: Path) -> None:
    """A judge elsewhere may take an hour without any processor here: `task.reward_deadline_s` ends it."""
    context, bell = short(tmp_path), threading.Event()
    running = Running(context, ReplayEngine(np.full(3, 0.01), lambda request: 4, RealClock(bell)), bell)
    running.rewards.poll = list  # type: ignore[method-assign]
    evidence = Evidence()
    try:
        running.announce(0)
        running.assign(prompt(0))

        def awaited() -> bool:
            evidence.heard(context.heart.message())
            return "awaited_rewards" in evidence.moved

        wait_until(awaited, what="a sign of the reward that is awaited", deadline_s=20)
    finally:
        running.stop()


def test_an_engine_that_hangs_is_an_error_and_a_slow_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(waiting.time, "monotonic", clock)
    drawing, tokens = Drawing(DEADLINE_S), 0
    for _ in range(40):  # one token a minute
        clock.now, tokens = clock.now + 60.0, tokens + 1
        drawing.saw([((0, 0), tokens), ((0, 1), -1)], running=1)
    assert drawing.tokens == 40
    with pytest.raises(WaitedTooLong, match="for a token without progress; the engine process would"):
        for _ in range(12):
            clock.now += 60.0
            drawing.saw([((0, 0), tokens)], running=1)
    assert clock.now == 1000.0 + 51 * 60

"""A look at a run whose topics are long, on a real broker."""

from __future__ import annotations

import time
from pathlib import Path

from flows.view.follow import look_once
from flows.view.line_files import METRICS_FILE, MetricsFile, complete, lines_of
from infra.kafka_bus import KafkaBus
from infra.liveness import Pulses, Pulsing
from infra.roles.heart import Heart
from schemas.messages import Heartbeat
from schemas.topics import Topics
from schemas.wire import encode
from tests.factories import make_context, make_spec
from tests.fakes.fill import fill
from tests.unit.test_following import step
from tests.waiting import wait_until

BEATS, STEPS = 30_000, 2_000


def test_a_long_run_is_looked_at_and_reported_in_seconds(tmp_path: Path, kafka: str) -> None:
    record = make_context(make_spec(), tmp_path, run="looked-1").record
    record = record.model_copy(update={"bootstrap_servers": kafka})
    bus, topics = KafkaBus(kafka), Topics(record.id, record.spec.lengths.classes)
    bus.create_topics(topics.all())
    writer = bus.writer()
    for number in range(BEATS):
        beat = fill(Heartbeat, run=record.id, role="generator", number=number % 300, sent_at=time.time())
        writer.send(topics.status, encode(beat), key=f"generator-{number % 300}")
    for number in range(STEPS):
        writer.send(topics.ledger, encode(step(number, run=record.id)), key=str(number))
    writer.flush(60)
    began = time.monotonic()
    view = look_once(record)
    took = time.monotonic() - began
    assert len(view.processes) == 300 and view.last is not None and view.last["step"] == STEPS - 1
    assert took < 10, "on a machine that does nothing else it takes one or two"
    print(f"look: {took:.2f} s")
    complete(MetricsFile(tmp_path / METRICS_FILE), bus, topics, record.id)
    assert [row["step"] for row in lines_of(tmp_path / METRICS_FILE)] == list(range(STEPS))
    writer.close()


def test_pulses_pass_through_a_real_broker(kafka: str) -> None:
    bus, topics = KafkaBus(kafka), Topics("pulsed-1", 1)
    bus.create_topics(topics.all())
    writer, heart = bus.writer(), Heart("pulsed-1", "trainer", 0)
    pulsing = Pulsing(bus, writer, topics, "pulsed-1", deadline_s=5.0).open()
    pulses = Pulses(bus, topics, "pulsed-1", deadline_s=5.0).open()

    def moves() -> bool:
        heart.counters["step"] = heart.counters.get("step", 0) + 1
        heart.beat(writer, topics)
        return pulses.still_s() < 2.0 and "trainer-0" in pulses.waits()

    wait_until(moves, what="a pulse of a trainer that moves", deadline_s=60)
    wait_until(lambda: pulses.still_s() > 3.0, what="stillness", deadline_s=60)
    pulsing.close()
    pulses.close()
    writer.close()

"""Heartbeats after an outage of the broker."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from kafka.errors import KafkaTimeoutError

from infra.bus import BusError, Writer, read_all
from infra.kafka_bus import KafkaWriter
from infra.memory_bus import MemoryBus, MemoryWriter
from infra.roles import entry
from tests.factories import make_context, make_spec
from tests.waiting import wait_until


class Lost(MemoryWriter):
    """A writer that has lost a record."""

    closed = False

    def send(self, *given: Any, **named: Any) -> Any:
        raise BusError("a record was not accepted")

    def close(self) -> None:
        self.closed = True
        raise BusError("not all records are acknowledged")


class Away(MemoryBus):
    """A bus that gives a writer only when it is asked for the third time."""

    asked = 0

    def writer(self, batch: int | None = None) -> Any:
        self.asked += 1
        if self.asked in (2, 3):  # the first writer is that of the context
            raise BusError("the broker is away")
        return Lost(self) if self.asked == 1 else super().writer(batch)


@pytest.mark.parametrize("role", ["rank", "engine_ranks", "relay", "generator"])
def test_who_loses_nothing_beats_again_when_the_broker_is_back(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for pause in ("HEARTBEAT_S", "STEADY_S", "_NEW_WRITER_S"):
        monkeypatch.setattr(entry, pause, 0.01)
    monkeypatch.setattr("tests.factories.MemoryBus", Away)
    context, ended = make_context(make_spec(), tmp_path, role=role), threading.Event()
    lost, bus = context.writer, context.bus
    assert isinstance(lost, Lost) and isinstance(bus, Away)
    beating = threading.Thread(target=entry._beats, args=(context, ended))
    beating.start()
    try:
        if role == "generator":  # it has lost samples, perhaps, and ends
            beating.join(10)
            assert not beating.is_alive() and bus.asked == 1
            return
        wait_until(lambda: read_all(bus, context.topics.status, deadline_s=5), what="a heartbeat")
    finally:
        ended.set()
        beating.join(10)
    assert not beating.is_alive() and bus.asked == 4 and lost.closed
    assert caplog.text.count("heartbeats stop until the broker is back") == 1


def test_a_writer_that_can_not_end_says_so() -> None:
    class Producer:
        def close(self, timeout: float) -> None:
            raise KafkaTimeoutError("Timeout waiting for future")

    writer: Writer = KafkaWriter(Producer(), "broker:9092")  # type: ignore[arg-type]
    with pytest.raises(BusError, match="broker:9092 did not acknowledge all records before the end"):
        writer.close()

"""Following a topic beside a loop."""

from __future__ import annotations

import threading

import pytest

from infra.bus import Record
from infra.memory_bus import MemoryBus
from infra.tail import Tail
from schemas.topics import Topic
from tests.waiting import wait_until


def test_what_goes_wrong_in_the_thread_is_raised_in_the_loop() -> None:
    def refuse(records: list[Record]) -> list[Record]:
        raise ValueError(f"{len(records)} record that nobody can read")

    bus, topic = MemoryBus(), Topic("t", 1)
    bus.create_topics([topic])
    bus.writer().send(topic, b"x", key="k")
    tail = Tail(bus.reader(topic), refuse, threading.Event()).open()
    with pytest.raises(ValueError, match="1 record that nobody can read"):
        wait_until(tail.take, what="the error")
    tail.close()

"""The engine process's side of the pipe, with an engine that needs no model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest

from producers.engines.base import EngineError, Finished, Installed, Pace, Request
from producers.engines.engine_process import (
    Abort,
    Holds,
    Install,
    Made,
    Order,
    Paced,
    Ready,
    Refused,
    Report,
    Submit,
    answer,
)


class CountingEngine:
    """Gives each request its `max_tokens`, one a step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.length: dict[str, int] = {}

    def submit(self, request: Request) -> None:
        if request.max_tokens < 1:
            raise EngineError(f"{request.id} may have no token")
        self.left[request.id] = self.length[request.id] = request.max_tokens

    def step(self, wait_s: float) -> list[Finished]:
        self.left = {name: tokens - 1 for name, tokens in self.left.items()}
        done = [name for name, tokens in self.left.items() if tokens == 0]
        for name in done:
            del self.left[name]
        return [
            Finished(name, np.arange(self.length[name], dtype=np.int32), np.zeros(0, np.float32), "stop")
            for name in done
        ]

    def abort(self, ids: Sequence[str]) -> None:
        for name in ids:
            del self.left[name]

    def install(self, weights: bytes, *, recompute: bool) -> Installed:
        return Installed({"file": weights.hex(), "recompute": str(recompute)}, dict(self.left))

    def pace(self) -> Pace:
        return Pace([1], [0.5])

    def unfinished(self) -> dict[str, int]:
        return dict(self.left)

    def close(self) -> None:
        pass


@pytest.fixture
def link() -> Iterator[Connection]:
    ours, theirs = Pipe()
    thread = threading.Thread(target=answer, args=(theirs, CountingEngine))
    thread.start()
    assert read(ours) == [Paced(Pace([1], [0.5]), {}), Ready()]
    yield ours
    ours.close()
    thread.join(timeout=10)
    assert not thread.is_alive(), "it goes on without a generator"


def submit(name: str, tokens: int) -> Submit:
    return Submit(Request(name, [1], tokens, seed=0, priority=0.0))


def send(link: Connection, *orders: Order) -> None:
    link.send_bytes(msgspec.msgpack.encode(list(orders)))


def read(link: Connection) -> list[Report]:
    assert link.poll(10), "no answer"
    return msgspec.msgpack.decode(link.recv_bytes(), type=list[Report])


def names(reports: Sequence[Report]) -> list[str]:
    return [report.id for report in reports if isinstance(report, Made)]


def test_makes_what_it_is_told_and_reports_together_what_finishes_together(link: Connection) -> None:
    send(link, *(submit(f"s{n}", n) for n in (2, 1, 2)), submit("x", 2))
    first, second = read(link), read(link)
    assert names(first) == ["s1"]
    assert sorted(names(second)) == ["s2", "x"]
    (made,) = (report for report in first if isinstance(report, Made))
    assert np.frombuffer(made.tokens, np.int32).tolist() == [0]


def test_forgets_what_is_not_wanted_and_waits_when_nothing_is_left(link: Connection) -> None:
    send(link, submit("a", 10**9), submit("b", 10**9))
    send(link, Abort(["a", "b", "never seen"]))
    assert not link.poll(0.05)
    send(link, submit("c", 1))
    assert names(read(link)) == ["c"]


def test_installs_between_two_steps_and_says_what_is_unfinished(link: Connection, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"abc")
    send(link, submit("long", 10**9), Install(str(tmp_path / "weights"), recompute=True))
    (holds,) = read(link)
    assert isinstance(holds, Holds)
    assert holds.installed.digests == {"file": b"abc".hex(), "recompute": "True"}
    assert set(holds.installed.tokens) == {"long"}
    send(link, Abort(["long"]))


@pytest.mark.parametrize("make", [CountingEngine, lambda: _refuse()])
def test_what_goes_wrong_is_told(make: Callable[[], CountingEngine]) -> None:
    ours, theirs = Pipe()
    send(ours, submit("empty", 0))
    answer(theirs, make)
    told = [report for _ in range(1 + (make is CountingEngine)) for report in read(ours)]
    assert isinstance(told[-1], Refused) and told[-1].reason.endswith("may have no token")


def _refuse() -> CountingEngine:
    raise EngineError("this one may have no token")

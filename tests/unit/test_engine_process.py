"""The engine process's side of the pipe, with an engine that needs no model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import pytest

from infra.weights.patch import Patch, PatchFile
from producers.engines.engine import DrawnAnswer, EngineError, Pace, SampleRequest
from producers.engines.engine_messages import (
    Abort,
    AnswerReport,
    GoOn,
    Holds,
    Install,
    Order,
    Paced,
    Prepare,
    PreparedReport,
    Ready,
    Refused,
    Report,
    Rest,
    Rested,
    Submit,
    Took,
)
from producers.engines.engine_process import answer


class CountingEngine:
    """Gives each request its `max_tokens`, one a step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.length: dict[str, int] = {}
        self.go = threading.Event()  # it takes its time beside steps until this is set
        self.go.set()

    def submit(self, request: SampleRequest) -> None:
        if request.max_tokens < 1:
            raise EngineError(f"{request.id} may have no token")
        self.left[request.id] = self.length[request.id] = request.max_tokens

    def step(self, wait_s: float) -> list[DrawnAnswer]:
        self.left = {name: tokens - 1 for name, tokens in self.left.items()}
        done = [name for name, tokens in self.left.items() if tokens == 0]
        for name in done:
            del self.left[name]
        return [
            DrawnAnswer(name, np.arange(self.length[name], dtype=np.int32), np.zeros(0, np.float32), "stop")
            for name in done
        ]

    def abort(self, ids: Sequence[str]) -> None:
        for name in ids:
            del self.left[name]

    def prepare(self, patch: Patch) -> None:
        assert self.go.wait(10)
        if patch.since is not None:
            raise EngineError("this engine takes whole versions")
        self.prepared = patch.root

    def install(self, *, recompute: bool) -> dict[str, int]:
        self.root = f"{self.prepared}, {recompute}"
        return dict(self.left)

    def digests(self) -> dict[str, str]:
        assert self.go.wait(10)
        return {"root": self.root}

    def pace(self) -> Pace:
        return Pace([1], [0.5])

    def unfinished(self) -> dict[str, int]:
        return dict(self.left)

    def close(self) -> None:
        pass


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def link(engine: CountingEngine) -> Iterator[Connection]:
    ours, theirs = Pipe()
    thread = threading.Thread(target=answer, args=(theirs, lambda: engine))
    thread.start()
    assert read(ours) == [Paced(Pace([1], [0.5]), {}), Ready()]
    yield ours
    ours.close()
    thread.join(timeout=10)
    assert not thread.is_alive(), "it goes on without a generator"


def submit(name: str, tokens: int) -> Submit:
    return Submit(SampleRequest(name, [1], tokens, seed=0, priority=0.0))


def send(link: Connection, *orders: Order) -> None:
    link.send_bytes(msgspec.msgpack.encode(list(orders)))


def read(link: Connection) -> list[Report]:
    assert link.poll(10), "no answer"
    return msgspec.msgpack.decode(link.recv_bytes(), type=list[Report])


def names(reports: Sequence[Report]) -> list[str]:
    return [report.id for report in reports if isinstance(report, AnswerReport)]


def finished(link: Connection) -> list[str]:
    """The names of those that finish next. Where steps are slow, reports of the pace come before."""
    while not (found := names(reports := read(link))):
        assert {type(report) for report in reports} == {Paced}
    return found


def test_makes_what_it_is_told_and_reports_together_what_finishes_together(link: Connection) -> None:
    send(link, *(submit(f"s{n}", n) for n in (2, 1, 2)), submit("x", 2))
    first, second = read(link), read(link)
    assert names(first) == ["s1"]
    assert sorted(names(second)) == ["s2", "x"]
    (made,) = (report for report in first if isinstance(report, AnswerReport))
    assert np.frombuffer(made.tokens, np.int32).tolist() == [0]


def test_says_its_pace_together_with_the_last_sample(link: Connection) -> None:
    """So whoever has all samples has a pace that counts them all, too."""
    send(link, submit("a", 1), submit("b", 2))
    assert names(read(link)) == ["a"]
    assert [type(report) for report in read(link)] == [AnswerReport, Paced]


def test_forgets_what_is_not_wanted_and_waits_when_nothing_is_left(link: Connection) -> None:
    send(link, submit("a", 10**9), submit("b", 10**9))
    send(link, Abort(["a", "b", "never seen"]))
    assert not link.poll(0.05)
    send(link, submit("c", 1))
    assert names(read(link)) == ["c"]


def whole(root: str, since: str | None = None) -> PatchFile:
    return PatchFile({}, {}, since=since, root=root)


def test_prepares_and_hashes_beside_steps_and_installs_between_two(
    link: Connection, engine: CountingEngine
) -> None:
    engine.go.clear()
    first, second = whole("first"), whole("second")
    send(link, submit("long", 10**9), Prepare(str(first.path)), Prepare(str(second.path)), submit("a", 3))
    assert finished(link) == ["a"], "steps go on"
    engine.go.set()
    assert [*read(link), *read(link)] == [PreparedReport(), PreparedReport()]
    engine.go.clear()
    send(link, Install(recompute=True))
    (took,) = read(link)
    assert isinstance(took, Took) and set(took.installed.tokens) == {"long"} and took.installed.pause_s >= 0
    send(link, submit("b", 3))
    assert finished(link) == ["b"], "steps go on"
    send(link, Abort(["long"]))
    engine.go.set()
    assert read(link) == [Holds({"root": "second, True"})], "without a sample too"


def test_at_rest_it_makes_no_step_until_it_goes_on(link: Connection, engine: CountingEngine) -> None:
    send(link, submit("long", 10**9), Rest())
    assert read(link) == [Rested()]
    left = dict(engine.left)
    send(link, submit("b", 2))
    assert not link.poll(0.05), "it paces, or makes steps"
    assert engine.left == left | {"b": 2}
    send(link, GoOn(), Abort(["long"]))
    assert names(read(link)) == ["b"]


class Sleeper(CountingEngine):
    """Says when it gives its memory back."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[str] = []

    def digests(self) -> dict[str, str]:
        self.slept.append("hashes")
        return super().digests()

    def sleep(self) -> None:
        self.slept.append("sleeps")

    def wake(self) -> None:
        self.slept.append("wakes")


@pytest.mark.parametrize("engine", [Sleeper()])
def test_it_sleeps_when_its_weights_are_hashed_and_wakes(link: Connection, engine: Sleeper) -> None:
    first = whole("first")
    send(link, Prepare(str(first.path)))
    assert read(link) == [PreparedReport()]
    engine.go.clear()
    send(link, Install(recompute=False), Rest())
    assert isinstance(read(link)[0], Took) and not link.poll(0.05)
    engine.go.set()
    assert [*read(link), *read(link)] == [Holds({"root": "first, False"}), Rested()]
    send(link, GoOn(), submit("a", 1))
    assert names(read(link)) == ["a"] and engine.slept == ["hashes", "sleeps", "wakes"]


def test_what_goes_wrong_beside_steps_is_told(link: Connection) -> None:
    patch = whole("new", since="old")
    send(link, submit("long", 10**9), Prepare(str(patch.path)))
    assert read(link) == [Refused("this engine takes whole versions")]


@pytest.mark.parametrize("make", [CountingEngine, lambda: _refuse()])
def test_what_goes_wrong_is_told(make: Callable[[], CountingEngine]) -> None:
    ours, theirs = Pipe()
    send(ours, submit("empty", 0))
    answer(theirs, make)
    told = [report for _ in range(1 + (make is CountingEngine)) for report in read(ours)]
    assert isinstance(told[-1], Refused) and told[-1].reason.endswith("may have no token")


def _raising(error: Exception) -> Callable[[], CountingEngine]:
    def make() -> CountingEngine:
        raise error

    return make


@pytest.mark.parametrize(
    ("error", "unfit"),
    [
        (AssertionError("all layers must have one window"), True),
        (ValueError("no such dtype"), True), (NotImplementedError(), True),
        # another process gave memory of the GPU back meanwhile: the next start measures anew
        (AssertionError("Error in memory profiling. Initial free memory 70 GiB"), False),
        # another process holds memory at the moment, such as a trainer, or an engine that ends
        (ValueError("Free memory on device cuda:0 (9.1/80.0 GiB) on startup is less than"), False),
        (ValueError("Available memory on node 0 (3.1/24.0 GiB) on kv cache allocation is less than"), False),
        (RuntimeError("CUDA error"), False), (OSError("no space left"), False),
    ],
)  # fmt: skip
def test_an_error_by_which_vllm_refuses_a_model_or_setting_is_met_by_every_start(
    error: Exception, unfit: bool
) -> None:
    ours, theirs = Pipe()
    answer(theirs, _raising(error))
    (told,) = read(ours)
    assert isinstance(told, Refused) and told.lasting is unfit
    assert told.reason.startswith(f"the engine failed while it starts: {type(error).__name__}")


def _refuse() -> CountingEngine:
    raise EngineError("this one may have no token")

"""The engine process: runs the engine, which decodes one step after the other, and does little else.

generator ── submit, abort, hand over, prepare, install ──► this process: reads what has come, then one step
          ◄── finished, handed over, prepared, took, holds ─

Work that need not be done between two steps runs in a thread beside them: preparing and hashing weights.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from infra.errors import Explained
from infra.supervise.argument_file import read_argument
from infra.weights.patch import read_patch
from producers.engines import engine_end
from producers.engines.engine import (
    DrawnAnswer,
    Installed,
    LocalEngine,
    SleepingEngine,
    engine_of,
)
from producers.engines.engine_messages import (
    Abort,
    AnswerReport,
    EngineOptions,
    GoOn,
    Handed,
    HandOver,
    Holds,
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
from schemas.importing import said
from schemas.runspec import RunSpec

PACE_S = 0.5
# how errors of vLLM begin if others gave memory back while it measured what is free, or hold it at the moment
_OTHERS_MEMORY = ("Error in memory profiling", "Free memory on device", "Available memory on node")

_Result = TypeVar("_Result")
_orders = msgspec.msgpack.Decoder(list[Order])
_encode = msgspec.msgpack.Encoder().encode


class Beside:
    """A thread that does one thing after the other. The results are taken between two steps."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._under_way: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()
        self.done, self._bell = Pipe(duplex=False)  # `done` gets one message for each finished thing

    def finish(self) -> None:
        """Wait until everything is done, and handle all results."""
        while self._under_way:
            self.take()

    def do(self, work: Callable[[], _Result], then: Callable[[_Result], None]) -> None:
        """Do `work` in the thread; later, `take` calls `then` with its result."""
        self._under_way.append((future := self._pool.submit(work), then))
        future.add_done_callback(lambda _: self._bell.send_bytes(b"."))

    def take(self) -> None:
        """Handle the oldest result. Raises the error of its work."""
        self.done.recv_bytes()
        future, then = self._under_way.popleft()
        then(future.result())


def main() -> None:
    """Serve the generator until it closes the connection."""
    answer(*link_and_engine())


def link_and_engine() -> tuple[Connection, Callable[[], LocalEngine]]:
    """Return the connection of an engine process, and what makes the engine, by its arguments."""
    options = msgspec.json.decode(read_argument(sys.argv[1]), type=EngineOptions)
    spec = RunSpec.model_validate_json(options.spec)
    link = int(sys.argv[2])
    os.set_inheritable(link, False)  # the generator hears of our end by it, and not of that of our children
    return Connection(link), lambda: engine_of(options.model, spec, options.far)


def _serve(link: Connection, engine: LocalEngine) -> None:
    with ThreadPoolExecutor(1, "beside") as pool:
        _Server(link, engine, Beside(pool)).run()


def answer(
    link: Connection, make: Callable[[], LocalEngine],
    serve: Callable[[Connection, LocalEngine], None] = _serve,
) -> None:  # fmt: skip
    """Make the engine, then take orders, step, and report until the generator ends.

    `serve`: takes other orders than a generator's. An error that ends the engine is reported; of one that is
    not Explained the log has the traceback, too.
    """
    made = False
    engine_end.tell_by(lambda error: link.send_bytes(_encode([Refused(str(error), error.lasting)])))
    try:
        gc.disable()  # it would take seconds, while millions of objects come and none goes
        engine, made = make(), True
        gc.freeze()
        gc.enable()
        link.send_bytes(_encode([Paced(engine.pace(), {}), Ready()]))
        serve(link, engine)
    except (EOFError, ConnectionError):
        pass  # the generator has ended, or rank 0 on another machine
    except Explained as error:
        link.send_bytes(_encode([Refused(str(error), error.lasting)]))
    except Exception as error:
        traceback.print_exc()
        unfit = not made and _is_unfit(error)
        doing = "works" if made else "starts"
        reason = f"the engine failed while it {doing}: {said(error)}"
        link.send_bytes(_encode([Refused(reason, unfit)]))


def _is_unfit(error: Exception) -> bool:
    """Whether a start of the engine failed because of its model or settings: another start would, too."""
    if str(error).startswith(_OTHERS_MEMORY):
        return False
    return isinstance(error, ValueError | TypeError | NotImplementedError | KeyError | AssertionError)


class _Server:
    def __init__(self, link: Connection, engine: LocalEngine, beside: Beside) -> None:
        self._link, self._engine, self._beside = link, engine, beside
        self._running: set[str] = set()
        self._rests = False

    def run(self) -> None:
        said_at = time.monotonic()
        while True:
            self._listen()
            made = self._engine.step(0.0)
            self._running.difference_update(sample.id for sample in made)
            reports: list[Report] = [report_of(answer) for answer in made]
            ended = made and not self._running
            if ended or (self._running and time.monotonic() - said_at > PACE_S):
                said_at = time.monotonic()
                reports.append(Paced(self._engine.pace(), self._engine.unfinished()))
            if reports:  # in one message: with its last answer the generator has the pace that counts it
                self._say(*reports)

    def _listen(self) -> None:
        """Obey all orders that have come. Without running samples, or at rest, wait for one."""
        while came := wait([self._link, self._beside.done], 0 if self._running and not self._rests else None):
            if self._beside.done in came:
                self._beside.take()
            if self._link in came:
                for order in _orders.decode(self._link.recv_bytes()):
                    self._obey(order)

    def _say(self, *reports: Report) -> None:
        self._link.send_bytes(_encode(reports))

    def _obey(self, order: Order) -> None:
        engine = self._engine
        if isinstance(order, Submit):
            engine.submit(order.request)
            self._running.add(order.request.id)
        elif isinstance(order, Abort):
            ids = self._running.intersection(order.ids)
            engine.abort(sorted(ids))
            self._running -= ids
        elif isinstance(order, HandOver):
            parts = engine.hand_over(order.ids)
            self._running.difference_update(part.id for part in parts)
            self._say(Handed([report_of(part) for part in parts]))
        elif isinstance(order, Rest):
            self._beside.finish()
            self._rests = True
            if isinstance(engine, SleepingEngine):
                engine.sleep()
            self._say(Rested())
        elif isinstance(order, GoOn):
            self._rests = False
            if isinstance(engine, SleepingEngine):
                engine.wake()
        elif isinstance(order, Prepare):
            file = Path(order.file)
            self._beside.do(lambda: engine.prepare(read_patch(file)), lambda _: self._say(PreparedReport()))
        else:
            began = time.perf_counter()
            tokens = engine.install(recompute=order.recompute)
            self._say(Took(Installed(tokens, time.perf_counter() - began)))
            self._beside.do(engine.digests, lambda digests: self._say(Holds(digests)))


def report_of(answer: DrawnAnswer) -> AnswerReport:
    """Return an answer as a message."""
    plain = AnswerReport(answer.id, answer.tokens.tobytes(), answer.logprobs.tobytes(), answer.finish)
    if (routes := answer.routes) is None:
        return plain
    _, layers, taken = routes.shape
    return replace(plain, routes=routes.tobytes(), routed=(layers, taken, routes.itemsize))


if __name__ == "__main__":
    main()

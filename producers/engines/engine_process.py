"""vLLM in a process of its own: it decodes, one step after the other, and does nothing else.

generator ── submit, abort, hand over, install ──► this process: reads what has come, then one decode step
          ◄── finished, handed over, installed ─────
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from infra.errors import Explained
from producers.engines.base import Engine, Finished, Installed, Pace, Request, Unfinished

PACE_S = 0.5


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `VllmEngine` is made with."""

    model: str
    dtype: str
    slots: int
    max_model_len: int
    temperature: float
    kv_cache_mib: int
    threads: int
    batch_invariant: bool


class Submit(msgspec.Struct, tag="submit"):
    """To the engine: a sample to be made."""

    request: Request


class Abort(msgspec.Struct, tag="abort"):
    """To the engine: samples that are not wanted any more."""

    ids: list[str]


class HandOver(msgspec.Struct, tag="hand_over"):
    """To the engine: samples that another one goes on with."""

    ids: list[str]


class Install(msgspec.Struct, tag="install"):
    """To the engine: weights to go on with, in a safetensors file."""

    file: str
    recompute: bool


class Ready(msgspec.Struct, tag="ready"):
    """From the engine: it can take requests."""


class Made(msgspec.Struct, tag="made"):
    """From the engine: a finished sample, or how far one is."""

    id: str
    tokens: bytes  # int32
    logprobs: bytes  # float32
    finish: str


class Handed(msgspec.Struct, tag="handed"):
    """From the engine: how far it had made those that it handed over."""

    parts: list[Made]


class Holds(msgspec.Struct, tag="holds"):
    """From the engine: the weights are installed."""

    installed: Installed


class Paced(msgspec.Struct, tag="paced"):
    """From the engine: how long its steps take, and how far it is. Before it is ready, and now and then."""

    pace: Pace
    tokens: dict[str, int]  # of what it has not finished


class Refused(msgspec.Struct, tag="refused"):
    """From the engine: why it ends."""

    reason: str


Order = Submit | Abort | HandOver | Install
Report = Ready | Made | Handed | Holds | Paced | Refused
_orders = msgspec.msgpack.Decoder(list[Order])
_encode = msgspec.msgpack.Encoder().encode


def main() -> None:
    """Serve until the other end is closed."""
    options = msgspec.json.decode(sys.argv[1], type=EngineOptions)
    answer(Connection(int(sys.argv[2])), lambda: _make(options))


def _make(options: EngineOptions) -> Engine:
    from producers.engines.vllm_engine import VllmEngine

    engine = VllmEngine(**msgspec.structs.asdict(options))
    engine.profile()
    return engine


def answer(link: Connection, make: Callable[[], Engine]) -> None:
    """Make the engine, then orders in, reports out, and a step in between; what goes wrong is told."""
    try:
        gc.disable()  # seconds, while millions of objects come and none goes
        engine = make()
        gc.freeze()
        gc.enable()
        link.send_bytes(_encode([Paced(engine.pace(), {}), Ready()]))
        _serve(link, engine)
    except (EOFError, BrokenPipeError):
        pass  # the generator has ended
    except Explained as error:
        link.send_bytes(_encode([Refused(str(error))]))


def _serve(link: Connection, engine: Engine) -> None:
    running: set[str] = set()
    said_at = time.monotonic()
    while True:
        while link.poll(0 if running else None):
            for order in _orders.decode(link.recv_bytes()):
                _obey(order, engine, running, link)
        if made := engine.step(0.0):
            running.difference_update(sample.id for sample in made)
            link.send_bytes(_encode([_made(sample, sample.finish) for sample in made]))
        if running and time.monotonic() - said_at > PACE_S:
            said_at = time.monotonic()
            link.send_bytes(_encode([Paced(engine.pace(), engine.unfinished())]))


def _obey(order: Order, engine: Engine, running: set[str], link: Connection) -> None:
    if isinstance(order, Submit):
        engine.submit(order.request)
        running.add(order.request.id)
    elif isinstance(order, Abort):
        ids = running.intersection(order.ids)
        engine.abort(sorted(ids))
        running -= ids
    elif isinstance(order, HandOver):
        parts = engine.hand_over(order.ids)
        running.difference_update(part.id for part in parts)
        link.send_bytes(_encode([Handed([_made(part, "") for part in parts])]))
    else:
        weights = Path(order.file).read_bytes()
        link.send_bytes(_encode([Holds(engine.install(weights, recompute=order.recompute))]))


def _made(sample: Finished | Unfinished, finish: str) -> Made:
    return Made(sample.id, sample.tokens.tobytes(), sample.logprobs.tobytes(), finish)


if __name__ == "__main__":
    main()

"""The engine process that is profiled: times decode steps and new weights, and nothing beside.

`streamrl profile` starts it. The engine is the one that generators run.
"""

from __future__ import annotations

from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from infra.core_waits import WorkWatch
from infra.weights.patch import read_patch
from producers.engines.engine import LocalEngine
from producers.engines.engine_messages import AnswerReport
from producers.engines.engine_process import answer, link_and_engine, report_of
from producers.engines.step_timing import StepTable, TimedDraw, draw_timed


class TimedInstall(msgspec.Struct, frozen=True, kw_only=True, tag="timed_install"):
    """An order: install the weights in a patch file, and time it."""

    file: str
    recompute: bool


class InstallTimes(msgspec.Struct, frozen=True, kw_only=True, tag="install_times"):
    """Seconds of preparing new weights and of the pause, and hashes of what the engine holds then."""

    prepare_s: float
    install_s: float
    digests: dict[str, str]


class DrawReport(msgspec.Struct, frozen=True, kw_only=True, tag="draw_report"):
    """The steps of a draw, and its finished answers."""

    table: StepTable
    answers: list[AnswerReport]


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True, tag="engine_memory"):
    """The engine's memory."""

    memory_tokens: int  # that its KV cache holds; 0: it can't say


ProfileOrder = TimedDraw | TimedInstall
ProfileReport = DrawReport | InstallTimes | EngineMemory

_orders = msgspec.msgpack.Decoder(ProfileOrder)
_encode = msgspec.msgpack.Encoder().encode


def main() -> None:
    """Obey orders until the process that started this one closes the connection."""
    answer(*link_and_engine(), serve_profile)


def serve_profile(link: Connection, engine: LocalEngine) -> None:
    """Say what the engine holds, then answer one order after the other."""
    link.send_bytes(_encode([EngineMemory(memory_tokens=int(getattr(engine, "memory_tokens", 0)))]))
    while True:
        order = _orders.decode(link.recv_bytes())
        found: ProfileReport
        if isinstance(order, TimedDraw):
            table, answers = draw_timed(engine, order, lambda: wait([link], 0))
            found = DrawReport(table=table, answers=[report_of(one) for one in answers])
        else:
            found = _installed(engine, order)
        link.send_bytes(_encode([found]))


def _installed(engine: LocalEngine, order: TimedInstall) -> InstallTimes:
    """Install weights as a generator's engine process does, one thing after the other."""
    seconds, watch = [], WorkWatch()
    engine.prepare(read_patch(Path(order.file)))
    seconds.append(watch.end().seconds)
    watch.begin()
    engine.install(recompute=order.recompute)
    seconds.append(watch.end().seconds)
    return InstallTimes(prepare_s=seconds[0], install_s=seconds[1], digests=engine.digests())


if __name__ == "__main__":
    main()

"""Serves a run's figures at /metrics for as long as the run goes on.

every process ── heartbeats ──► follower of the run flow ──► /metrics ◄── Prometheus
ledger, evaluations, ... ────────────┘                          ▲
                                 .streamrl/prometheus/RUN.json ─┘ says where, for file_sd_configs

One address has the figures of all processes, also of those that joined the run from far away, which a
Prometheus server could not reach. A figure is made when it is asked for, and costs nothing between.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from flows.monitoring.process_figures import process_figures
from flows.monitoring.run_figures import run_figures
from flows.view.follow import Follower
from flows.view.run_view import RunView
from infra.files.private import make_private
from infra.files.writing import write_whole
from infra.runs import RunRecord
from infra.stack.paths import StackPaths
from infra.stack.ports import accepts, address, any_free_port
from infra.stack.stack_errors import PortTaken

_TRIED = 100  # ports, from the run file's on


class RunCollector(Collector):
    """Makes the figures of a run from its view."""

    def __init__(self, see: Callable[[Callable[[RunView], list[Metric]]], list[Metric]]) -> None:
        self._see, self._began_at = see, time.time()

    def collect(self) -> Iterator[Metric]:
        yield from self._see(lambda view: list(figures_of(view, self._began_at)))

    def describe(self) -> list[Metric]:
        """Return nothing: the names depend on the run."""
        return []


def figures_of(view: RunView, began_at: float) -> Iterator[Metric]:
    """Yield all figures of a run. `began_at`: when this start of the run began."""
    yield from run_figures(view, began_at)
    yield from process_figures(view.run, view.processes.values())


@contextmanager
def exporting(record: RunRecord, follower: Follower, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the figures of a run while the block lasts, if its run file wants it.

    A run goes on without if no port is free or the folder can't be written; `say` gets the reason.
    """
    with contextlib.ExitStack() as stack:
        if (section := record.spec.prometheus) is not None:
            try:
                port = stack.enter_context(_serving(RunCollector(follower.see), section.port))
                say(f"figures for Prometheus: http://{address()}:{port}/metrics")
                stack.enter_context(_named(record.id, f"{address()}:{port}"))
            except (OSError, PortTaken) as error:
                say(
                    f"the run goes on without figures for Prometheus, or without its file of targets: {error}"
                )
        yield


@contextmanager
def _serving(collector: Collector, first: int) -> Iterator[int]:
    registry = CollectorRegistry()
    registry.register(collector)
    server, thread, port = _server(registry, first)
    try:
        yield port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _server(registry: CollectorRegistry, first: int) -> tuple[WSGIServer, Any, int]:
    """Return a server on the first port that is free, with its thread and port. 0: any free one."""
    for count in range(_TRIED):
        port = first + count if first else any_free_port()
        with contextlib.suppress(OSError, OverflowError):  # taken, perhaps since a moment ago; beyond 65535
            return *start_http_server(port, addr=address(), registry=registry), port
    raise PortTaken(
        f"no port from {first} to {first + _TRIED - 1} is free at {address()}, or that is no address of ours",
        fix="set prometheus.port in the run file to another one, or to 0",
    )


@contextmanager
def _named(run: str, target: str) -> Iterator[Path]:
    """Keep a file that names the run's address, in the folder that a Prometheus server watches."""
    folder = StackPaths.locate().targets
    make_private(folder)
    _sweep(folder)
    file = folder / f"{run}.json"
    write_whole(file, json.dumps([{"targets": [target], "labels": {}}]) + "\n")
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove the files of runs that were killed: nobody listens at their addresses any more."""
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            target = str(json.loads(file.read_text())[0]["targets"][0])
            if not accepts(int(target.rpartition(":")[2])):
                file.unlink()

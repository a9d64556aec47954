"""CPU seconds of each process of a run, between any two moments."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import psutil

_EVERY_S = 0.25
_NAMES = {
    "producers.feeder": "feeder",
    "consumers.trainer": "trainer",
    "producers.generator": "generator",
    "producers.engines.engine_process": "engine",
    "producers.reward_worker": "reward",
    "infra.supervise.guard": "guard",
    "flows.cli": "flow",
}


class CpuWatch:
    """Looks at all processes below a root, and at some services, four times a second."""

    def __init__(self, root: psutil.Process, services: Mapping[str, psutil.Process]) -> None:
        self._root, self._services = root, services
        self._seen: list[tuple[float, dict[str, float]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no longer."""
        self._ended.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> dict[str, float]:
        """CPU seconds by process name."""
        inside = [seen for moment, seen in self._seen if begin <= moment <= end]
        if not inside:
            return {}
        return {name: value - inside[0].get(name, 0.0) for name, value in inside[-1].items()}

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            now: dict[str, float] = {}
            try:
                family = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for name, process in [*self._services.items(), *((_name(p), p) for p in family)]:
                try:
                    times = process.cpu_times()
                except psutil.Error:
                    continue
                now[name] = now.get(name, 0.0) + times.user + times.system
            self._seen.append((time.time(), now))


def _name(process: psutil.Process) -> str:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return "other"
    return next((name for module, name in _NAMES.items() if module in line), "other")

"""Machines, demands and times for tests of plans. Speeds are like those of GPUs, and of no real one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.planning.machine_pools import MachinePool
from flows.planning.stage_times import DeviceRoom, EngineTimes, LearnerTimes, LinkTimes
from flows.planning.step_estimate import IterationDemand


def engine_of(
    slots: int, *, speed: float = 1.0, first_s: float = 0.008, each_s: float = 6e-5, **more: float
) -> EngineTimes:
    """An engine whose steps grow by the sample."""
    return EngineTimes(
        tuple((first_s + each_s * max(0, many - 1)) / speed for many in range(slots + 1)), **more
    )


class TableOfTests:
    """A source of times: each kind of hardware has a speed, and memory for some slots on a device."""

    def __init__(
        self, speeds: Mapping[str, float], *, slots: int = 64, token_s: float = 1e-3,
        degrees: Sequence[int] = (1,), least_trainer: int = 1, version_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.known = tuple(speeds)
        self.turn_slots, self.problem_in_turns = slots, ""
        self._speeds, self._slots, self._token_s, self._degrees = speeds, slots, token_s, degrees
        self._least, self._bytes = least_trainer, version_bytes

    def tensor_parallel(self, hardware: str, devices: int) -> Sequence[int]:
        return [degree for degree in self._degrees if degree <= devices]

    def most_slots(self, hardware: str, tensor_parallel: int) -> int:
        return self._slots * tensor_parallel

    def engine(self, hardware: str, tensor_parallel: int, slots: int) -> EngineTimes:
        return engine_of(slots, speed=self._speeds[hardware] * tensor_parallel**0.7)

    def learner(self, hardware: str, devices: int) -> LearnerTimes | None:
        if devices < self._least:
            return None
        return LearnerTimes(
            self._token_s / devices / self._speeds[hardware], version_bytes=self._bytes, step_s=0.1
        )

    def trainer_problem(self, hardware: str, devices: int) -> str:
        return "" if devices >= self._least else f"it takes {self._least} devices"

    def slots_in_turns(self, hardware: str, tensor_parallel: int) -> int:
        return self.turn_slots * tensor_parallel

    def room_in_turns(self, hardware: str, tensor_parallel: int) -> DeviceRoom | None:
        return None

    def turn_problem(self, hardware: str, devices: int) -> str:
        return self.problem_in_turns

    def engine_source(self, hardware: str, tensor_parallel: int, slots: int) -> str:
        return "of the test"

    def learner_source(self, hardware: str, devices: int) -> str:
        return "of the test"


def demand_of(
    lengths: Sequence[int] = (), *, lookahead: float = 1.0, prompt: float = 100.0, seed: int = 1
) -> IterationDemand:
    """An iteration's demand, by default 256 lengths with a long tail."""
    drawn = np.array(lengths)
    if not len(drawn):
        drawn = np.clip(np.random.default_rng(seed).lognormal(6.0, 0.9, 256), 8, 8000).astype(int)
    return IterationDemand(drawn, prompt, lookahead)


def pool_of(name: str = "a", machines: int = 4, devices: int = 8, **more: object) -> MachinePool:
    """A pool of fast machines."""
    return MachinePool(name, **{"hardware": "fast", "machines": machines, "devices": devices, **more})  # type: ignore[arg-type]


LINK = LinkTimes(1e9, 0.02)


def plan_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, config: Mapping[str, Any], run_file: str
) -> Path:
    """Write a run file beside the config of its model and an empty task; return the run file."""
    monkeypatch.setenv("STREAMRL_HOME", str(folder / "home"))
    monkeypatch.setenv("COLUMNS", "250")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "task.py").write_text("")
    file = folder / "run.yaml"
    file.write_text(run_file)
    return file

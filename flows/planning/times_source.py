"""Says how fast a run's parts would be on any machines: a hardware table does, and a measured profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flows.planning.stage_times import DeviceRoom, EngineTimes, LearnerTimes


class TimesSource(Protocol):
    """The figures of one model, with the settings of one run file."""

    @property
    def known(self) -> Sequence[str]:
        """All kinds of hardware that it has figures of."""

    def tensor_parallel(self, hardware: str, devices: int) -> Sequence[int]:
        """Return over how many devices of a machine a generator can be spread."""

    def most_slots(self, hardware: str, tensor_parallel: int) -> int:
        """Return how many samples one generator can draw at once; 0: the model does not fit."""

    def engine(self, hardware: str, tensor_parallel: int, slots: int) -> EngineTimes:
        """Return the times of one generator that fits."""

    def learner(self, hardware: str, devices: int) -> LearnerTimes | None:
        """Return the times of a trainer with so many devices; None if the model does not fit."""

    def trainer_problem(self, hardware: str, devices: int) -> str:
        """Return why a trainer with so many devices has no room; empty: it has."""

    def slots_in_turns(self, hardware: str, tensor_parallel: int) -> int:
        """Return how many samples a generator draws at once that takes turns with the trainer; 0: none."""

    def room_in_turns(self, hardware: str, tensor_parallel: int) -> DeviceRoom | None:
        """Return the memory of each device of such a generator; None: nobody knows, or on CPUs."""

    def turn_problem(self, hardware: str, devices: int) -> str:
        """Return why the trainer can't keep its state beside engines in turns; empty: it can."""

    def engine_source(self, hardware: str, tensor_parallel: int, slots: int) -> str:
        """Say where the times of a generator come from: measured, from a table, or corrected."""

    def learner_source(self, hardware: str, devices: int) -> str:
        """Say where the times of a trainer come from."""

"""Times of a source with slower engines, so that estimates come out as simulations did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flows.planning.stage_times import DeviceRoom, EngineTimes, LearnerTimes
from flows.planning.times_source import TimesSource
from flows.plans.simulated_split import slower_engine


@dataclass(frozen=True)
class SlowerEngines:
    """A source of times that asks another one."""

    of: TimesSource
    factor: float

    @property
    def known(self) -> Sequence[str]:
        """All kinds of hardware that it has figures of."""
        return self.of.known

    def tensor_parallel(self, hardware: str, devices: int) -> Sequence[int]:
        """Return over how many devices of a machine a generator can be spread."""
        return self.of.tensor_parallel(hardware, devices)

    def most_slots(self, hardware: str, tensor_parallel: int) -> int:
        """Return how many samples one generator can draw at once."""
        return self.of.most_slots(hardware, tensor_parallel)

    def engine(self, hardware: str, tensor_parallel: int, slots: int) -> EngineTimes:
        """Return the times of one generator, slower than they are."""
        return slower_engine(self.of.engine(hardware, tensor_parallel, slots), self.factor)

    def learner(self, hardware: str, devices: int) -> LearnerTimes | None:
        """Return the times of a trainer."""
        return self.of.learner(hardware, devices)

    def trainer_problem(self, hardware: str, devices: int) -> str:
        """Return why a trainer with so many devices has no room; empty: it has."""
        return self.of.trainer_problem(hardware, devices)

    def slots_in_turns(self, hardware: str, tensor_parallel: int) -> int:
        """Return how many samples a generator draws at once that takes turns with the trainer."""
        return self.of.slots_in_turns(hardware, tensor_parallel)

    def room_in_turns(self, hardware: str, tensor_parallel: int) -> DeviceRoom | None:
        """Return the memory of each device of a generator that takes turns with the trainer."""
        return self.of.room_in_turns(hardware, tensor_parallel)

    def turn_problem(self, hardware: str, devices: int) -> str:
        """Return why the trainer can't keep its state beside engines in turns; empty: it can."""
        return self.of.turn_problem(hardware, devices)

    def engine_source(self, hardware: str, tensor_parallel: int, slots: int) -> str:
        """Say where the times of a generator come from."""
        return self.of.engine_source(hardware, tensor_parallel, slots)

    def learner_source(self, hardware: str, devices: int) -> str:
        """Say where the times of a trainer come from."""
        return self.of.learner_source(hardware, devices)

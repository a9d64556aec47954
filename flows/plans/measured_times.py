"""Times of a run file's parts as a profile measured them here; of other hardware from the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flows.planning import profile_times
from flows.planning.machine_pools import CPU
from flows.planning.stage_times import EngineTimes, LearnerTimes, LinkTimes
from flows.planning.step_estimate import IterationDemand
from flows.planning.times_source import TimesSource
from schemas.profile import Profile
from schemas.runspec import RunSpec

_ROOM = 1.2  # times the tokens that a running sample has on average: memory that a slot is given
_BEYOND = 2  # times as many slots as the largest batch that was measured


@dataclass(frozen=True)
class MeasuredTimes:
    """A source of times that knows this machine by a profile, and asks another source about the rest."""

    spec: RunSpec
    profile: Profile
    demand: IterationDemand
    lengths: Sequence[tuple[int, int]]  # of prompts and answers
    others: Callable[[], TimesSource]  # asked only if there are machines of another kind
    other_names: Sequence[str]

    @property
    def here(self) -> str:
        """The kind of hardware that was measured, as a run file names it."""
        machine = self.profile.identity.machine.upper()
        return next((one for one in self.other_names if one != CPU and one.upper() in machine), CPU)

    @property
    def known(self) -> Sequence[str]:
        """All kinds of hardware that it has figures of."""
        return list(dict.fromkeys([self.here, *self.other_names]))

    def measured(self, hardware: str) -> bool:
        """Whether figures of this hardware were measured, rather than computed from a table."""
        return hardware.upper() == self.here.upper()

    def tensor_parallel(self, hardware: str, devices: int) -> Sequence[int]:
        """Return over how many devices of a machine a generator can be spread: here, as it was measured."""
        if not self.measured(hardware):
            return self.others().tensor_parallel(hardware, devices)
        return [self.spec.generator.threads if self._shares_cores else 1]

    @property
    def _shares_cores(self) -> bool:
        return self.here == CPU

    def most_slots(self, hardware: str, tensor_parallel: int) -> int:
        """Return how many samples one generator can draw at once; 0: the model does not fit."""
        if not self.measured(hardware):
            return self.others().most_slots(hardware, tensor_parallel)
        generation = self.profile.generation
        most = int(_BEYOND * max(one.samples for one in generation.points))
        if generation.memory_tokens:
            tokens = self.demand.prompt_tokens / 2 + self.demand.context * _ROOM
            most = min(most, int(generation.memory_tokens / tokens))
        return most

    def engine(self, hardware: str, tensor_parallel: int, slots: int) -> EngineTimes:
        """Return the times of one generator that fits."""
        if not self.measured(hardware):
            return self.others().engine(hardware, tensor_parallel, slots)
        threads = tensor_parallel if self._shares_cores else None
        return profile_times.measured_engine(self.profile, slots=slots, threads=threads)

    def learner(self, hardware: str, devices: int) -> LearnerTimes | None:
        """Return the times of a trainer with so many devices; on a CPU these are threads of its ranks."""
        if not self.measured(hardware):
            return self.others().learner(hardware, devices)
        threads = self.spec.trainer.threads if self._shares_cores else 1
        if devices % threads:
            return None  # ranks have as many threads as the run file says
        return profile_times.measured_learner(
            self.profile, ranks=devices // threads, threads=threads, lengths=self.lengths
        )

    def work_cores(self) -> float | None:
        """Return the cores that engines and learner have beside all others; None if they share none."""
        return profile_times.cores_for_work(self.profile) if self._shares_cores else None

    def link(self) -> LinkTimes:
        """Return how fast versions of the weights come from the run's store to an engine of this machine."""
        return profile_times.measured_link(self.profile)

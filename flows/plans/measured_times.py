"""Times of a run file's parts as profiles measured them; of all else from the table, corrected where one can.

| asked for                                         | times                             |
|---------------------------------------------------|-----------------------------------|
| as it was measured, with up to twice the slots    | the profile's curves              |
| a GPU's other devices, ranks and slots            | the table's, corrected by points  |
| a CPU's other threads, ranks and slots            | the profile's curves, less sure   |
| hardware without a profile                        | the table's                       |

On a CPU the table corrects nothing: CPUs differ from its figures by a factor of ten, small models spend their
steps in what it leaves out, and it does not know how threads share caches. The rule of `profile_times` for
other threads and slots is the more honest one there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from flows.planning import profile_times
from flows.planning.corrected_profile import (
    corrected_by_engine,
    corrected_by_learner,
    doublings_between,
    largest_batch,
)
from flows.planning.learner_memory import ModelSizes, counts_for_memory, learner_memory
from flows.planning.machine_pools import CPU, MachinePool
from flows.planning.main_memory import generator_bytes, kv_cache_bytes, trainer_bytes
from flows.planning.model_shape import ShapeError
from flows.planning.stage_times import DeviceRoom, EngineTimes, LearnerTimes
from flows.planning.step_estimate import IterationDemand
from flows.planning.table_times import SLOT_ROOM, TableTimes
from flows.plans.named_profiles import HardwareProfile
from schemas.runspec import RunSpec

_BEYOND = 2  # times as many slots as the largest batch that was measured


@dataclass(frozen=True)
class MeasuredTimes:
    """A source of times that knows some kinds of hardware by profiles, and asks the table about the rest."""

    spec: RunSpec
    profiles: Sequence[HardwareProfile]  # one for each kind of hardware
    demand: IterationDemand
    lengths: Sequence[tuple[int, int]]  # of prompts and answers
    table: Callable[[], TableTimes]  # asked only where a profile does not say
    table_names: Sequence[str]

    @property
    def known(self) -> Sequence[str]:
        """All kinds of hardware that it has figures of."""
        return list(dict.fromkeys([*(one.hardware for one in self.profiles), *self.table_names]))

    def tensor_parallel(self, hardware: str, devices: int) -> Sequence[int]:
        """Return over how many devices of a machine a generator can be spread."""
        one = self._profile_of(hardware)
        if one is None:
            return self.table().tensor_parallel(hardware, devices)
        if _shares_cores(one):
            return [self.spec.generator.threads * self._measured]
        table = self._table_for(one)
        return table.tensor_parallel(hardware, devices) if table else [self._measured]

    def most_slots(self, hardware: str, tensor_parallel: int) -> int:
        """Return how many samples one generator can draw at once; 0: the model does not fit."""
        one = self._profile_of(hardware)
        if one is None:
            return self.table().most_slots(hardware, tensor_parallel)
        table = self._table_for(one)
        if table and tensor_parallel != self._measured:
            return table.most_slots(hardware, tensor_parallel)
        generation = one.profile.generation
        most = int(_BEYOND * max(point.samples for point in generation.points))
        if table:  # beyond those slots it has times, too
            most = max(most, table.most_slots(hardware, self._measured))
        if generation.memory_tokens:
            tokens = self.demand.prompt_tokens / 2 + self.demand.context * SLOT_ROOM
            most = min(most, int(generation.memory_tokens / tokens))
        if table and kv_cache_bytes(self.spec, on_gpu=True) is not None:  # the profile may be of another one
            most = min(most, table.most_slots(hardware, self._measured))
        return most

    def engine(self, hardware: str, tensor_parallel: int, slots: int) -> EngineTimes:
        """Return the times of one generator that fits."""
        one = self._profile_of(hardware)
        if one is None:
            return self.table().engine(hardware, tensor_parallel, slots)
        if _shares_cores(one):
            threads = tensor_parallel // self._measured
            found = profile_times.measured_engine(one.profile, slots=slots, threads=threads)
            weights = float(one.profile.weights.whole_bytes)
            return replace(found, memory_bytes=generator_bytes(self.spec, weights))
        table = self._table_for(one)
        if table is None or self._has_engine(one, tensor_parallel, slots):
            found = _apart(profile_times.measured_engine(one.profile, slots=slots))
            return replace(found, room=table.engine_room(hardware, tensor_parallel) if table else None)
        endless = replace(table, endless=True)
        # on as many devices the profile knows what fits
        asked = endless if tensor_parallel == self._measured else table
        return corrected_by_engine(
            one.profile, asked.engine(hardware, tensor_parallel, slots),
            endless.engine(hardware, self._measured, largest_batch(one.profile)), context=self.demand.context,
            doublings=doublings_between(self._measured, tensor_parallel),
        )  # fmt: skip

    def learner(self, hardware: str, devices: int) -> LearnerTimes | None:
        """Return the times of a trainer with so many devices; on a CPU these are threads of its ranks."""
        one = self._profile_of(hardware)
        if one is None:
            return self.table().learner(hardware, devices)
        if _shares_cores(one):
            threads = self.spec.trainer.threads
            if devices % threads:
                return None  # ranks have as many threads as the run file says
            ranks = devices // threads
            found = profile_times.measured_learner(
                one.profile,
                ranks=ranks,
                threads=threads,
                lengths=self.lengths,
                checkpoint_steps=self._checkpoint_steps,
            )
            return replace(found, memory_bytes=self._main_memory(one, ranks))
        table = self._table_for(one)
        if table is None or devices == _ranks(one):
            found = profile_times.measured_learner(
                one.profile, ranks=devices, lengths=self.lengths, checkpoint_steps=self._checkpoint_steps
            )
            room = table.learner_room(hardware, devices) if table else None
            return replace(found, beside=1.0, cores=0.0, room=room)
        asked = table.learner(hardware, devices)
        if asked is None:
            return None
        there = cast(LearnerTimes, replace(table, endless=True).learner(hardware, _ranks(one)))
        return corrected_by_learner(
            one.profile, asked, there, tokens=min(self.demand.tokens, self.spec.trainer.microbatch_tokens),
            length=self.demand.tokens / self.demand.samples,
            doublings=doublings_between(_ranks(one), devices), checkpoint_steps=self._checkpoint_steps,
        )  # fmt: skip

    def start_s(self, hardware: str) -> float | None:
        """Return the seconds until a generator that is started is ready; None if they were not measured."""
        one = self._profile_of(hardware)
        return one.profile.generation.start_s if one else None

    def _main_memory(self, one: HardwareProfile, ranks: int) -> float:
        """Return the main memory of a trainer on CPUs."""
        parameters = one.profile.identity.parameters
        four_bits = False
        try:
            table = self.table()
            sizes, four_bits = counts_for_memory(table.shape), table.four_bits
        except ShapeError:
            sizes = ModelSizes(parameters)
        tokens = min(float(self.spec.trainer.microbatch_tokens), self.demand.tokens)
        of_rank = learner_memory(self.spec, sizes, ranks, tokens=tokens, on_gpu=False, four_bits=four_bits)
        return trainer_bytes(parameters, ranks, of_rank)

    def trainer_problem(self, hardware: str, devices: int) -> str:
        """Return why a trainer with so many devices has no room; empty: it has, as on those measured."""
        one = self._profile_of(hardware)
        table = self.table() if one is None else self._table_for(one)
        if table is None or (one is not None and devices == _ranks(one)):
            return ""
        return table.trainer_problem(hardware, devices)

    def slots_in_turns(self, hardware: str, tensor_parallel: int) -> int:
        """Return how many samples a generator draws at once that takes turns with the trainer."""
        one, most = self._profile_of(hardware), self.most_slots(hardware, tensor_parallel)
        table = self._table_for(one) if one else self.table()
        return min(most, table.slots_in_turns(hardware, tensor_parallel)) if table else most

    def room_in_turns(self, hardware: str, tensor_parallel: int) -> DeviceRoom | None:
        """Return the memory of each device of a generator that takes turns with the trainer."""
        one = self._profile_of(hardware)
        table = self._table_for(one) if one else self.table()
        return table.room_in_turns(hardware, tensor_parallel) if table else None

    def turn_problem(self, hardware: str, devices: int) -> str:
        """Return why the trainer can't keep its state beside engines in turns; empty: it can."""
        one = self._profile_of(hardware)
        table = self._table_for(one) if one else self.table()
        return table.turn_problem(hardware, devices) if table else ""

    def engine_source(self, hardware: str, tensor_parallel: int, slots: int) -> str:
        """Say where the times of a generator come from."""
        one = self._profile_of(hardware)
        if one is None:
            return self.table().engine_source(hardware, tensor_parallel, slots)
        return self._source(
            one, as_measured=_shares_cores(one) or self._has_engine(one, tensor_parallel, slots)
        )

    def learner_source(self, hardware: str, devices: int) -> str:
        """Say where the times of a trainer come from."""
        one = self._profile_of(hardware)
        if one is None:
            return self.table().learner_source(hardware, devices)
        return self._source(one, as_measured=_shares_cores(one) or devices == _ranks(one))

    def near(self, pool: MachinePool) -> MachinePool:
        """Return a pool beside the object store with the link and the free cores that its profile says."""
        one = self._profile_of(pool.hardware)
        if one is None or pool.site:
            return pool
        link = profile_times.measured_link(one.profile)
        cores = profile_times.cores_for_work(one.profile) if _shares_cores(one) else None
        return replace(pool, link=link, free_cores=cores)

    @property
    def _measured(self) -> int:
        """The ranks of an engine that was profiled: a profile of other ones is refused."""
        return self.spec.generator.devices

    @property
    def _checkpoint_steps(self) -> float:
        return self.spec.trainer.checkpoint_every * self.spec.algorithm.optimizer_steps

    def _source(self, one: HardwareProfile, *, as_measured: bool) -> str:
        if as_measured or self._table_for(one) is None:
            return f"measured, {one.file}" if one.file else "measured"
        return f"from the hardware table, corrected by {one.source}"

    def _profile_of(self, hardware: str) -> HardwareProfile | None:
        return next((one for one in self.profiles if one.hardware.upper() == hardware.upper()), None)

    def _table_for(self, one: HardwareProfile) -> TableTimes | None:
        """Return the table if it can say more about a profile's hardware."""
        if _shares_cores(one) or one.hardware.upper() not in {name.upper() for name in self.table_names}:
            return None
        try:
            return self.table()
        except ShapeError:  # a model that nobody has counted: the profile alone has to do
            return None

    def _has_engine(self, one: HardwareProfile, tensor_parallel: int, slots: int) -> bool:
        return tensor_parallel == self._measured and slots <= _BEYOND * largest_batch(one.profile)


def _ranks(one: HardwareProfile) -> int:
    return one.profile.identity.sizes["trainer.ranks"]


def _shares_cores(one: HardwareProfile) -> bool:
    return one.hardware.upper() == CPU


def _apart(engine: EngineTimes) -> EngineTimes:
    """Return an engine that has its devices for itself: in a profile of one GPU the learner had a part."""
    return replace(engine, beside_step=1.0, beside_samples=1.0, cores=0.0)

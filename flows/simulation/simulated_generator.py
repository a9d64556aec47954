"""A generator in virtual time: the real decoding on an engine of given speed, and where its time goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flows.planning.stage_times import EngineTimes
from flows.simulation.simulation_result import DRAWING, GENERATOR_CAUSES
from infra.weights.patch import Patch, PatchFile
from producers.dispatch.jobs import SampleJob
from producers.engines.engine import SampleRequest
from producers.engines.without_model import ReplayEngine, VirtualClock
from producers.generator_core import Decoding, Left
from producers.installing import VerifiedWeights
from schemas.runspec import RunSpec

FEW_SLOTS = 0.25  # share of the slots: fewer samples than that, with none to come, are the tail
FULL_SLOTS = 0.9  # share of the slots: with so many samples, more would have to wait
# A generator hears of an answer's end between two steps, and its next request comes while the second is made.
# Measured in runs: 1.04 steps of an empty slot for each answer.
_LATE_STEPS = 1.0


class _NoPatch(PatchFile):
    """A patch of a model without tensors: it needs no memory."""

    def __init__(self, since: str | None, root: str) -> None:
        self._since, self._root = since, root

    def read(self) -> Patch:
        return Patch(self._since, self._root, {})


def weights_of(version: int) -> VerifiedWeights:
    """Return a version of weights that have no tensors."""
    root = f"root {version}"
    return VerifiedWeights(version, root, {}, _NoPatch(None, root))


class SimulatedGenerator:
    """One place for a generator; another process may take it after an outage."""

    def __init__(
        self, place: int, site: str, spec: RunSpec, times: EngineTimes, delivery_s: float, fetch_s: float,
        length_of: Callable[[SampleRequest], int], clock: VirtualClock,
    ) -> None:  # fmt: skip
        """`delivery_s`: of a message, one way. `fetch_s`: of prompts that it does not have yet."""
        self.place, self.site, self.times, self.delivery_s = place, site, times, delivery_s
        self._fetch_s = fetch_s
        self.name = f"g{place:05d}"
        slots = spec.generator.model_copy(update={"slots": times.slots})
        self._spec = spec.model_copy(update={"generator": slots})
        self._length_of, self._clock = length_of, clock
        self._table = np.array(times.batch_s)
        self.process = 0  # how many processes there were in this place
        self.is_there, self.is_wanted = False, True
        self.ends = float("inf")  # when the next sample is done
        self.speed = 1.0
        self.seconds = dict.fromkeys(GENERATOR_CAUSES, 0.0)
        self.idle_slots_s = self.there_s = self.paid_s = 0.0
        self.slot_s = self.full_s = 0.0  # of drawing: for each sample, and while nearly all slots were taken
        self.made = 0
        self._paid_since: float | None = clock.time  # its machine is there
        self._began = self._counts()
        self.left, self.left_at = 0, 0.0  # the process that said goodbye
        self.starts_at: float | None = None  # when a process is ready that is starting
        self._since = clock.time
        self._state = "away"
        self._stands = 0.0, 0.0
        self._free = self._running = 0
        self._make()

    def _make(self) -> None:
        times = self.times
        self.engine = ReplayEngine(
            self._table, self._length_of, self._clock, prefill_s=times.prefill_s, fill_s=times.fill_s,
            context_s=times.context_s, install_s=times.install_s, late_steps=_LATE_STEPS,
        )  # fmt: skip
        self.decoding = Decoding(self._spec, self.engine, self._clock.now)
        self._has_prompts = -1  # of iterations up to this one
        self._fetched_at = 0.0

    def fetch_prompts(self, jobs: Sequence[SampleJob], arrive: float) -> float:
        """Begin to fetch the prompts of jobs that arrive then, those of an iteration together.

        Return when the jobs can begin.
        """
        newest = max((job.prompt.iteration for job in jobs), default=-1)
        if newest > self._has_prompts:
            self._has_prompts, self._fetched_at = newest, arrive + self._fetch_s
        return max(arrive, self._fetched_at)

    def seconds_by_batch(self, attended: float) -> np.ndarray:
        """Return what it reports of its speed. `attended`: mean number of tokens that a sample attends to."""
        return self._table + self.times.context_s * attended * np.arange(len(self._table))

    def starts(self) -> None:
        """A process takes the place."""
        self.spend()
        self._make()
        self.process += 1
        self.is_there = True
        self.pay_from(self._clock.time)
        self._began = self._counts()
        if self.speed != 1.0:
            self.engine.set_speed(self.speed)

    def dies(self) -> int:
        """Its process ends. Return how many samples it had begun."""
        self.spend()
        begun = self.decoding.running if self.is_there else 0
        self.is_there, self.ends, self._state = False, float("inf"), "away"
        return begun

    def leaves(self) -> list[Left]:
        """Its process says goodbye. Return all that it had begun."""
        self.spend()
        begun = self.decoding.hand_over(self.decoding.begun)
        self.left, self.left_at = self.process, self._clock.time
        self.dies()
        return begun

    def pay_from(self, moment: float) -> None:
        """Its machine is there."""
        if self._paid_since is None:
            self._paid_since = moment

    def pay_until(self, moment: float) -> None:
        """Its machine is gone, or nobody pays for it any more."""
        if self._paid_since is not None:
            self.paid_s += moment - self._paid_since
            self._paid_since = None

    def _counts(self) -> tuple[dict[str, float], float, float, int]:
        return dict(self.seconds), self.slot_s, self.full_s, self.made

    def of_process(self) -> tuple[dict[str, float], float, float, int]:
        """Return the counts of its present process: seconds by cause, `slot_s`, `full_s` and samples."""
        seconds, slot_s, full_s, made = self._began
        return (
            {cause: spent - seconds[cause] for cause, spent in self.seconds.items()},
            self.slot_s - slot_s, self.full_s - full_s, self.made - made,
        )  # fmt: skip

    def set_speed(self, speed: float) -> None:
        """Go on at so much of its full speed."""
        if speed != self.speed:
            self.speed = speed
            if self.is_there:
                self.engine.set_speed(speed)

    @property
    def is_busy(self) -> bool:
        """Whether its engine computes anything."""
        return self.is_there and (self.decoding.running > 0 or sum(self.engine.standing_still()) > 0)

    def spend(self) -> None:
        """Note where the time went since the last call: the state since then was the same."""
        now = self._clock.time
        left = now - self._since
        if left <= 0:
            return
        self._since = now
        if self.is_there:
            self.there_s += left
            self.idle_slots_s += self._free * left
        installing, prefilling = self._stands
        part = min(left, installing)
        self.seconds["installing"] += part
        left -= part
        part = min(left, prefilling)
        self.seconds["prefilling"] += part
        self.seconds[self._state] += left - part
        if self._state in DRAWING:
            self.slot_s += left * self._running
            self.full_s += left * (self._running >= FULL_SLOTS * self.times.slots)
        self._stands = 0.0, 0.0

    def changed(self, *, more_to_come: bool) -> None:
        """Begin what may be begun, and note the state from now on. `more_to_come`: whether jobs wait."""
        self.spend()
        if not self.is_there:
            return
        self.decoding.fill()
        self.ends = self.engine.next_end()
        running = self.decoding.running
        self._running, self._free = running, max(0, self.times.slots - running)
        self._stands = self.engine.standing_still()
        if not self.speed:
            self._state = "waiting for its turn"
        elif running:
            few = running < FEW_SLOTS * self.times.slots and not (self.decoding.queued or more_to_come)
            self._state = "drawing the tail" if few else "drawing"
        elif self.decoding.needs is not None or self.decoding.version < 0:
            self._state = "waiting for weights"
        else:
            self._state = "waiting for jobs"

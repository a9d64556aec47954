"""Sets how fast everybody computes: colocated engines and learner take turns, and cores are shared evenly.

With fewer cores than all that compute would keep busy, each of them gets on by the same share of its full
speed. That changes whenever somebody begins or ends to compute.
"""

from __future__ import annotations

from flows.simulation.event_queue import EventQueue
from flows.simulation.simulated_fleet import SimulatedFleet
from flows.simulation.simulated_learner import SimulatedLearner
from flows.simulation.simulated_run import SimulatedRun


class SharingProcessors:
    """Sets the speed of engines and learner."""

    def __init__(
        self, run: SimulatedRun, fleet: SimulatedFleet, learner: SimulatedLearner, events: EventQueue
    ) -> None:
        self._run, self._fleet, self._learner, self._events = run, fleet, learner, events
        self._switching = False
        learner.waits_for_turn = run.colocated

    def look(self) -> None:
        """See whether anybody has to go on at another speed."""
        if self._run.colocated:
            self._take_turns()
        elif self._run.cores is not None:
            self._share(self._run.cores)

    def _share(self, cores: float) -> None:
        wanted = self._learner.cores if self._learner.is_busy else 0.0
        wanted += sum(one.times.cores for one in self._fleet.places if one.times.cores and one.is_busy)
        speed = min(1.0, cores / wanted) if wanted else 1.0
        if self._learner.cores:
            self._learner.set_speed(speed)
        self._fleet.set_speed(speed, sharing=True)

    def _take_turns(self) -> None:
        """The learner's turn begins when all of its step is here, and lasts until it has none."""
        if self._switching or self._learner.doing:
            return
        whole = self._learner.has_whole_step
        if whole == self._learner.waits_for_turn:  # it has to come, or to go
            self._learner.spend()
            self._learner.waits_for_turn = self._switching = True
            self._fleet.set_speed(0.0)
            self._events.after(self._run.switch_s, lambda: self._switched(whole))

    def _switched(self, to_learner: bool) -> None:
        self._learner.spend()
        self._switching = False
        self._learner.waits_for_turn = not to_learner
        if to_learner:
            self._learner.go_on()
        else:
            self._fleet.set_speed(1.0)

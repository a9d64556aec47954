"""Sets how fast everybody computes: colocated engines and learner take turns, and cores are shared evenly.

With fewer cores than all keep busy, everybody gets the same share. Engines also need more processor seconds
while the learner computes, which takes the caches from them; other engines take less from them. Where
processes take turns on a core, each step takes longer again. That changes whenever somebody begins or ends to
compute, and with the samples that an engine draws. Engines of a site with cores of its own share these alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flows.simulation.event_queue import EventQueue
from flows.simulation.simulated_fleet import SimulatedFleet
from flows.simulation.simulated_generator import SimulatedGenerator
from flows.simulation.simulated_learner import SimulatedLearner
from flows.simulation.simulated_run import SimulatedRun

# Measured with one to three engines, with and without a learner, on two cores.
_ENGINES = 0.4  # share that other engines take, of what a learner takes from an engine
_TURNS = 0.65  # more seconds of a step where all take turns, as a share of a step with one sample
_ALL_IN_TURNS = 1.5  # times that the cores are wanted; from there on all take turns


class SharingProcessors:
    """Sets the speed of engines and learner."""

    def __init__(
        self, run: SimulatedRun, fleet: SimulatedFleet, learner: SimulatedLearner, events: EventQueue
    ) -> None:
        self._run, self._fleet, self._learner, self._events = run, fleet, learner, events
        self._beside = {site.name for site in run.sites if site.cores is None}
        self._apart = {site.name: site.cores for site in run.sites if site.cores is not None}
        self._switching = False
        learner.waits_for_turn = run.colocated
        if run.colocated:
            learner.set_speed(1 / learner.beside)
            self._fleet.set_speed(1.0)

    def look(self) -> None:
        """See whether anybody has to go on at another speed."""
        if self._run.colocated:
            self._take_turns()
        else:
            if self._run.cores is not None:
                self._share(self._run.cores, self._at_work(self._beside))
            for site, cores in self._apart.items():
                engines = self._at_work({site})
                wanted = sum(one.times.cores for one in engines)
                self._share_among(engines, cores, wanted, beside_learner=False)

    def _at_work(self, sites: Collection[str]) -> list[SimulatedGenerator]:
        return [one for one in self._fleet.places if one.site in sites and one.times.cores and one.is_busy]

    def _share(self, cores: float, at_work: Sequence[SimulatedGenerator]) -> None:
        learner = self._learner
        wanted = sum(one.times.cores for one in at_work) + (learner.cores if learner.is_busy else 0.0)
        if wanted and learner.is_busy:
            learner.set_speed(min(1.0, cores / wanted) / learner.beside)
        self._share_among(at_work, cores, wanted, beside_learner=learner.is_busy)

    def _share_among(
        self, at_work: Sequence[SimulatedGenerator], cores: float, wanted: float, *, beside_learner: bool
    ) -> None:
        """Set the speed of engines that share cores. `wanted`: how many cores all would keep busy."""
        in_turns = min(1.0, max(0.0, (wanted / cores - 1) / (_ALL_IN_TURNS - 1)))
        taken = 1.0 if beside_learner else _ENGINES if len(at_work) > 1 else 0.0
        for one in at_work:
            samples = min(one.times.slots, max(1, one.decoding.running))
            slower = 1 + taken * (one.times.beside(samples) - 1)
            slower += _TURNS * in_turns * one.times.fixed_share(samples)
            self._fleet.set_speed_of(one, min(1.0, cores / wanted) / slower)

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

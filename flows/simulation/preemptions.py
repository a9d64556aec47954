"""Takes machines of a simulated run away, each at random moments of its own, and gives them back.

The moments depend on the seed alone.

With a notice that is long enough a generator leaves at once and hands over what it has; else that is lost. A
machine that is back starts its generators, which are ready after the run's `start_s`.
"""

from __future__ import annotations

import numpy as np

from flows.planning.preemption import Preemption
from flows.simulation.event_queue import EventQueue
from flows.simulation.simulated_fleet import SimulatedFleet
from flows.simulation.simulated_run import SimulatedRun, SimulationError

_MOST = 20_000  # preemptions between the ends of two iterations
_HOUR_S = 3600.0
_STREAM = 77  # of random numbers


class Preemptions:
    """The preemptions of one run."""

    def __init__(self, run: SimulatedRun, fleet: SimulatedFleet, events: EventQueue) -> None:
        self._fleet, self._events, self._seed = fleet, events, run.seed
        self._sites = [
            (number, site.name, site.machine_generators, site.preemption)
            for number, site in enumerate(run.sites)
            if site.preemption is not None and site.preemption.per_hour > 0
        ]
        self._random: dict[tuple[int, int], np.random.Generator] = {}  # by site and machine
        self._since_step = 0
        self.count = 0

    def look(self) -> None:
        """Take up machines that are new since the last iteration."""
        self._since_step = 0
        for number, name, size, preemption in self._sites:
            generators = sum(one.site == name for one in self._fleet.places)
            for machine in range(-(-generators // size)):
                if (number, machine) not in self._random:
                    self._random[number, machine] = np.random.default_rng(
                        [self._seed, _STREAM, number, machine]
                    )
                    self._plan(number, name, size, preemption, machine, 0.0)

    def _plan(
        self, number: int, name: str, size: int, preemption: Preemption, machine: int, away_s: float
    ) -> None:
        """Plan when a machine is taken away next. `away_s`: until it is back."""
        stays_s = float(self._random[number, machine].exponential(_HOUR_S / preemption.per_hour))

        def taken() -> None:
            mine = [one for one in self._fleet.places if one.site == name][machine * size :][:size]
            gone = [self._fleet.take_away(one, preemption.notice_s, preemption.back_s) for one in mine]
            if any(gone):
                self._counted(name)
            self._plan(number, name, size, preemption, machine, preemption.notice_s + preemption.back_s)

        self._events.after(away_s + stays_s, taken)

    def _counted(self, name: str) -> None:
        self.count += 1
        self._since_step += 1
        if self._since_step > _MOST:
            raise SimulationError(
                f"no iteration gets done: machines of {name} were taken away {_MOST:,} times "
                "since the last one"
            )

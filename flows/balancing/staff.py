"""The ways in which the number of a run's generators is changed.

LocalGenerators      processes on the run's own machine, which the run starts and stops
CalledGenerators     flow runs of a Prefect deployment (flows.flow_runs.called_generators)
NoGenerators         none: an autoscaler, or a person, follows what is recommended
"""

from __future__ import annotations

from typing import Protocol

from flows.run.commands import GENERATOR, own_numbers, worker
from flows.run.locations import Places
from flows.run.supervision import RunProcesses
from infra.errors import Explained
from infra.runs import RunRecord

LEAVING_S = 30.0  # for a generator to hand over what it has


class CannotChange(Explained):
    """The number of generators can't be changed; the message says why."""


class Staff(Protocol):
    """A way in which the number of generators is changed by one."""

    acts: bool  # whether it changes anything; else it only recommends

    def grow(self) -> None:
        """Add a generator. Raises CannotChange."""

    def shrink(self) -> None:
        """Have a generator leave. Raises CannotChange."""


class NoGenerators:
    """Changes nothing."""

    acts = False

    def grow(self) -> None:
        """Do nothing."""

    def shrink(self) -> None:
        """Do nothing."""


class LocalGenerators:
    """Generators that are processes of the run on this machine."""

    acts = True

    def __init__(self, crew: RunProcesses, record: RunRecord, places: Places) -> None:
        self._crew, self._record, self._places = crew, record, places

    def grow(self) -> None:
        """Start a generator, with the lowest number that is free."""
        placement, there = self._record.spec.placement, set(self._crew.names)
        at_sites = sum(planned.generators for planned in placement.sites.values())
        for number in own_numbers(len(there) + 1, placement.generators, at_sites):
            fresh = worker(GENERATOR, number, self._record, self._places)
            if fresh.name not in there:
                self._crew.add(fresh)
                return

    def shrink(self) -> None:
        """Have the generator with the highest number leave."""
        own = [name for name in self._crew.generators if "--site" not in self._crew.command(name)]
        if not own:
            raise CannotChange("the run has no generator of its own on this machine that could leave")
        self._crew.retire(max(own, key=lambda name: int(name.rpartition("-")[2])), LEAVING_S)

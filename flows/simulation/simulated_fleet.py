"""All generators of a simulated run: which are there, and which one has the next sample done."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

from flows.planning.stage_times import EngineTimes
from flows.simulation.event_queue import EventQueue
from flows.simulation.simulated_generator import SimulatedGenerator, weights_of
from flows.simulation.simulated_run import Outage, SimulatedRun
from flows.simulation.simulation_result import GENERATOR_CAUSES
from producers.dispatch.dispatcher import Dispatcher
from producers.engines.engine import SampleRequest
from producers.engines.without_model import VirtualClock
from schemas.runspec import RunSpec


class SimulatedFleet:
    """The generators of all sites. A place keeps its number when its process dies."""

    def __init__(
        self, run: SimulatedRun, spec: RunSpec, clock: VirtualClock, events: EventQueue,
        dispatcher: Dispatcher, length_of: Callable[[SampleRequest], int], attended: float,
    ) -> None:  # fmt: skip
        """`attended`: tokens that a sample attends to, on the average."""
        self._run, self._spec, self._clock, self._events = run, spec, clock, events
        self._dispatcher, self._length_of, self._attended = dispatcher, length_of, attended
        self.places: list[SimulatedGenerator] = []
        self.named: dict[str, SimulatedGenerator] = {}
        self.versions = {site.name: 0 for site in run.sites}  # that each site has
        self._engines = {site.name: site.engines for site in run.sites}
        self._delivery_s = {
            site.name: run.messages.delivery_s + (site.link.message_s if site.link else 0.0)
            for site in run.sites
        }
        self._ends: list[tuple[float, int]] = []  # a heap; some are out of date
        self._touched: dict[int, None] = {}
        self.drawn_again = 0
        self.start_s = dict.fromkeys(self._engines, 0.0)  # seconds of starts that are paid, by site
        for site in run.sites:
            for times in site.engines:
                self._start(self._place(site.name, times))

    def _place(self, site: str, times: EngineTimes) -> SimulatedGenerator:
        place = SimulatedGenerator(
            len(self.places), site, self._spec, times, self._delivery_s[site], self._length_of, self._clock
        )  # fmt: skip
        self.places.append(place)
        self.named[place.name] = place
        return place

    def _start(self, generator: SimulatedGenerator) -> None:
        """A new process is ready, with the weights that its site has."""
        if not generator.is_wanted:
            return
        generator.starts()
        generator.decoding.update(weights_of(self.versions[generator.site]))
        self._dispatcher.join(
            generator.name, generator.times.slots, generator.seconds_by_batch(self._attended),
            self._clock.time, keeps_bits=True,
        )  # fmt: skip
        self._dispatcher.delayed(generator.name, generator.delivery_s)
        self.touch(generator)

    def fails(self, outage: Outage) -> None:
        """A process dies, and perhaps another one comes."""
        generator = self.places[outage.generator]
        if not generator.is_there:
            return
        self.drawn_again += generator.dies()
        process = generator.process
        silence_s = 0.0 if outage.notice else self._spec.dispatch.silence_s
        self._events.after(silence_s, lambda: self._missed(generator, process))
        if outage.back_after_s < float("inf"):
            self._events.after(outage.back_after_s, lambda: self._start(generator))
        else:
            generator.is_wanted = False

    def _missed(self, generator: SimulatedGenerator, process: int) -> None:
        if generator.process == process and not generator.is_there:
            self._dispatcher.leave(generator.name, self._clock.time)

    def counts(self) -> dict[str, int]:
        """Return by site how many generators are there, or are starting."""
        found = dict.fromkeys(self._engines, 0)
        for one in self.places:
            found[one.site] += one.is_wanted
        return found

    def resize(self, wanted: Mapping[str, int]) -> None:
        """Add or remove generators, so that each of these sites has as many. The newest ones leave first."""
        present = self.counts()
        for site, count in wanted.items():
            for _ in range(count - present[site]):
                engines = self._engines[site]
                times = engines[sum(one.site == site for one in self.places) % len(engines)]
                place = self._place(site, times)
                self.start_s[site] += self._run.start_s
                self._events.after(self._run.start_s, lambda place=place: self._start(place))  # type: ignore[misc]
            mine = [one for one in self.places if one.site == site and one.is_wanted]
            for generator in mine[max(0, count) :] if count < present[site] else []:
                generator.is_wanted = False
                self.drawn_again += generator.dies()
                self._dispatcher.leave(generator.name, self._clock.time)

    def has(self, site: str, version: int) -> None:
        """A site's generators get new weights."""
        self.versions[site] = version
        for generator in self.places:
            if generator.site == site and generator.is_there:
                generator.decoding.update(weights_of(version))
                self.touch(generator)

    def touch(self, generator: SimulatedGenerator) -> None:
        """Note that a generator has something to look at."""
        self._touched[generator.place] = None

    def settle(self) -> None:
        """Let all that were touched begin what they can."""
        more = self._dispatcher.waiting > 0
        for place in self._touched:
            generator = self.places[place]
            generator.changed(more_to_come=more)
            if generator.ends < float("inf"):
                heapq.heappush(self._ends, (generator.ends, place))
        self._touched.clear()

    def set_speed(self, speed: float) -> None:
        """Let all go on at so much of their full speed."""
        for generator in self.places:
            self.set_speed_of(generator, speed)

    def set_speed_of(self, generator: SimulatedGenerator, speed: float) -> None:
        """Let one go on at so much of its full speed."""
        if generator.speed != speed:
            generator.spend()
            generator.set_speed(speed)
            self.touch(generator)

    @property
    def next_end(self) -> float:
        """When the next sample is done."""
        while self._ends and self.places[self._ends[0][1]].ends != self._ends[0][0]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else float("inf")

    def ended(self) -> Iterable[SimulatedGenerator]:
        """Return the generators with samples that are done by now, in order of place."""
        found: set[int] = set()
        while self.next_end <= self._clock.time:
            place = heapq.heappop(self._ends)[1]
            self.places[place].ends = float("inf")
            found.add(place)
        return [self.places[place] for place in sorted(found)]

    def spent(self) -> tuple[dict[str, float], float]:
        """Return the seconds of all generators by cause, and their slot seconds without a sample."""
        sums = dict.fromkeys(GENERATOR_CAUSES, 0.0)
        for generator in self.places:
            generator.spend()
            for cause, seconds in generator.seconds.items():
                sums[cause] += seconds
        return sums, sum(generator.idle_slots_s for generator in self.places)

    def holds(self, version: int) -> bool:
        """Whether all generators that are there have installed this version, or a newer one."""
        return all(
            one.decoding.version >= version and not one.engine.standing_still()[0]
            for one in self.places if one.is_there
        )  # fmt: skip

    def installed_in_s(self) -> float:
        """Return the seconds until no generator installs weights any more."""
        return max((one.engine.standing_still()[0] for one in self.places if one.is_there), default=0.0)

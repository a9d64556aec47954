"""All generators of a simulated run: which are there, and which one has the next sample done."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from flows.balancing.staff import LEAVING_S
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
        self._fetch_s = {site.name: 2 * site.link.message_s if site.link else 0.0 for site in run.sites}
        self._ends: list[tuple[float, int]] = []  # a heap; some are out of date
        self._touched: dict[int, None] = {}
        self.drawn_again = self.handed_over = 0
        for site in run.sites:
            for times in site.engines:
                place = self._place(site.name, times)
                place.starts_at = clock.time
                self._start(place, clock.time)

    def _place(self, site: str, times: EngineTimes) -> SimulatedGenerator:
        place = SimulatedGenerator(
            len(self.places), site, self._spec, times, self._delivery_s[site], self._fetch_s[site],
            self._length_of, self._clock,
        )  # fmt: skip
        self.places.append(place)
        self.named[place.name] = place
        return place

    def _start(self, generator: SimulatedGenerator, moment: float) -> None:
        """A new process is ready, with the weights that its site has."""
        if not generator.is_wanted or generator.starts_at != moment:  # it was taken away meanwhile
            return
        generator.starts_at = None
        generator.starts()
        generator.decoding.update(weights_of(self.versions[generator.site]))
        self._dispatcher.join(
            generator.name, generator.times.slots, generator.seconds_by_batch(self._attended),
            self._clock.time, keeps_bits=True,
        )  # fmt: skip
        self._dispatcher.delayed(generator.name, 2 * generator.delivery_s + generator.times.reward_s)
        self.touch(generator)

    def fails(self, outage: Outage) -> None:
        """A process dies or is taken away, and perhaps another one comes."""
        generator = self.places[outage.generator]
        if generator.is_there:
            self._let_go(generator, outage.notice_s, outage.notice_s)
            self._comes_back(generator, outage.notice_s + outage.back_after_s, 0.0)

    def _let_go(self, generator: SimulatedGenerator, notice_s: float, paid_s: float | None = None) -> None:
        """A process ends, and hands over what it has begun, if the notice is long enough for that.

        `paid_s`: for which its machine is still paid; None: until all is handed over.
        """
        process, now = generator.process, self._clock.time
        takes_s = self._run.messages.handover_s + generator.times.reward_s + generator.delivery_s
        self._pay_for(generator, min(takes_s, notice_s) if paid_s is None else paid_s)
        if notice_s < takes_s:
            self.drawn_again += generator.dies()
            self._events.after(self._spec.dispatch.silence_s, lambda: self._missed(generator, process))
            return
        begun = generator.leaves()
        parts = {left.begun.job.key: left.part("simulated", generator.name, now) for left in begun}
        self.handed_over += len(parts)

        def gone() -> None:
            if generator.process == process:
                self._dispatcher.handed_over(generator.name, {key: (part, 0) for key, part in parts.items()})
            self._missed(generator, process)

        self._events.after(takes_s, gone)

    def _pay_for(self, generator: SimulatedGenerator, seconds: float) -> None:
        """Pay for a generator's machine so long, and no longer."""
        until = self._clock.time + seconds
        self._events.at(until, lambda: generator.pay_until(until))

    def _comes_back(self, generator: SimulatedGenerator, after_s: float, start_s: float) -> None:
        """Another process comes in its place. `after_s`: until its machine is there; inf: none comes."""
        if after_s == float("inf"):
            generator.is_wanted = False
        else:
            self._events.after(after_s, lambda: self._begin(generator, start_s))

    def _begin(self, generator: SimulatedGenerator, start_s: float) -> None:
        """Begin to start a process. It is paid for from now on."""
        if generator.is_wanted:
            generator.pay_from(self._clock.time)
            moment = generator.starts_at = self._clock.time + start_s
            self._events.at(moment, lambda: self._start(generator, moment))

    def _missed(self, generator: SimulatedGenerator, process: int) -> None:
        if generator.process == process and not generator.is_there:
            self._dispatcher.leave(generator.name, self._clock.time)

    def take_away(self, generator: SimulatedGenerator, notice_s: float, back_after_s: float) -> bool:
        """Take a generator's machine away, for a while. Return whether there was anything to take."""
        if not generator.is_wanted or not (generator.is_there or generator.starts_at is not None):
            return False
        if generator.is_there:
            self._let_go(generator, notice_s, notice_s)
        else:  # it is starting
            generator.starts_at = None
            self._pay_for(generator, notice_s)
        self._comes_back(generator, notice_s + back_after_s, self._run.start_s)
        return True

    def wanted(self, site: str = "") -> list[SimulatedGenerator]:
        """Return the generators of a site, or of all, that are there, are starting or will be back."""
        return [one for one in self.places if one.is_wanted and site in ("", one.site)]

    def grow(self, site: str) -> None:
        """Start one more generator."""
        engines = self._engines[site]
        place = self._place(site, engines[sum(one.site == site for one in self.places) % len(engines)])
        if self._run.colocated:  # it takes its turn with the others
            place.set_speed(self.places[0].speed)
        self._begin(place, self._run.start_s)

    def shrink(self, site: str) -> bool:
        """Have the newest generator leave: it hands over what it has. Return whether there was one."""
        mine = self.wanted(site)
        if not mine:
            return False
        generator = mine[-1]
        generator.is_wanted = False
        if generator.is_there:
            self._let_go(generator, LEAVING_S)
        else:
            generator.pay_until(self._clock.time)
        return True

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

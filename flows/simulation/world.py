"""A run in virtual time, by discrete events. The code of a run decides everything in it.

    planner ──► dispatcher ──► generators: decoding on `ReplayEngine`s ──► whole groups ──► learner
       ▲                            ▲                                                         │
       │                            └──── site links ◄──── new weights ◄──────────────────────┤
       └───────────────────────────────────────── steps ◄─────────────────────────────────────┘

The clock goes from event to event. Events of one moment are handled in a fixed order, so the same run gives
the same result. A running sample that moves is handed over at once, is on its way for a while, and then its
new generator prefills its tokens, while nothing else gets on there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from flows.planning.workload import DrawnLengths
from flows.simulation.event_queue import EventQueue
from flows.simulation.preemptions import Preemptions
from flows.simulation.sharing_processors import SharingProcessors
from flows.simulation.simulated_balance import SimulatedBalance
from flows.simulation.simulated_fleet import SimulatedFleet
from flows.simulation.simulated_generator import SimulatedGenerator
from flows.simulation.simulated_learner import SimulatedLearner, WholeGroup
from flows.simulation.simulated_run import MessageTimes, SimulatedRun, SimulationError
from flows.simulation.simulation_result import SimulatedSpan, SimulatedStep, Simulation
from flows.simulation.site_links import SiteLink
from flows.simulation.virtual_chooser import as_measured, choose_virtually, usual_of
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.policy import Policy, policy_of
from producers.dispatch.service import LATENCY_S
from producers.engines.engine import SampleRequest
from producers.engines.without_model import VirtualClock
from producers.generator_core import MadeSample
from producers.planner import Planner
from producers.ranker.ranker import Question, question_of
from schemas.admission import first_open
from schemas.identity import SampleKey, sample_id, sample_key
from schemas.messages import Prompt, StepRecord
from schemas.taken import TakenGroups

MOST_SPANS = 20_000  # of a picture
_NEVER = float("inf")


def simulate(run: SimulatedRun) -> Simulation:
    """Simulate a run to its end. Raises SimulationError if it comes to a standstill."""
    return World(run).go()


class _ToldLengths:
    """A ranker that says of each problem what it is told to say."""

    name = "simulated"

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = {question_of(str(g), None, []).key: told for g, told in enumerate(lengths.tolist())}

    def predict(self, questions: Sequence[Question]) -> np.ndarray:
        return np.array([self._lengths[question.key] for question in questions])


class World:
    """One run. `policy`: of dispatch, instead of the one that the run file names."""

    def __init__(self, run: SimulatedRun, policy: Policy | None = None) -> None:
        algorithm = run.spec.algorithm
        if run.iterations is not None:
            algorithm = algorithm.model_copy(update={"iterations": run.iterations})
        task = run.spec.task.model_copy(update={"shuffle": False})
        self._run, self._algorithm, self._messages = run, algorithm, run.messages
        self._spec = run.spec.model_copy(update={"algorithm": algorithm, "task": task})
        workload = run.workload
        drawn = workload if isinstance(workload, DrawnLengths) else workload.draw(self._spec, run.seed)
        self._lengths: list[list[int]] = drawn.answers.tolist()
        self._clock = VirtualClock()
        self._events = EventQueue(self._clock)
        # a problem for each group, in order; its prompt says how many tokens it has
        problems = [{"id": str(g), "prompt": str(size)} for g, size in enumerate(drawn.prompts.tolist())]
        self._planner = Planner("simulated", self._spec, problems, lambda prompt: [0] * int(str(prompt)))
        self._ranker = _ToldLengths(drawn.predicted)
        policy = policy_of(self._spec) if policy is None else policy
        choose_virtually(policy, _seconds_of_choices(policy, run.messages))
        is_late = run.messages.delivery_s > 0 or any(
            site.link or engine.reward_s for site in run.sites for engine in site.engines
        )
        self._dispatcher = Dispatcher(policy, latency_s=LATENCY_S if is_late else 0.0)
        self._taken = TakenGroups(algorithm)
        self._learner = SimulatedLearner(self._spec, run.learner, self._taken, self._clock)
        self._fleet = SimulatedFleet(
            run, self._spec, self._clock, self._events, self._dispatcher, self._length_of, drawn.attended
        )
        self._preemptions = Preemptions(run, self._fleet, self._events)
        self._sharing = SharingProcessors(run, self._fleet, self._learner, self._events)
        self._links = {
            site.name: SiteLink(
                site.link, run.learner.version_bytes, np.random.default_rng((run.seed, number))
            )
            for number, site in enumerate(run.sites)
        }
        self._open: dict[int, Prompt] = {}
        self._parts: dict[int, dict[int, tuple[int, int]]] = {}  # by group, by index: tokens, oldest version
        self._made = self._tokens = self._admitted = self._steps = 0
        self._behind_barrier: tuple[int, int] | None = None  # a version, and the samples made before it comes
        self._awaited = 0  # the version that all wait for behind a barrier
        self._of_iteration: list[WholeGroup] = []  # trained in the iteration in work
        self.result = Simulation(algorithm.group_size, algorithm.lookahead)
        self._balance = SimulatedBalance(
            run, self._spec, self._fleet, self._learner, self._clock, drawn.attended, self.result
        ) if run.balance is not None else None  # fmt: skip

    def _length_of(self, request: SampleRequest) -> int:
        group, index = sample_key(request.id)
        return self._lengths[group][index]

    def go(self) -> Simulation:
        """Simulate the run to its end."""
        for outage in self._run.failures:
            self._events.at(outage.at_s, lambda outage=outage: self._fleet.fails(outage))  # type: ignore[misc]
        self._preemptions.look()
        self._admit()
        while len(self.result.steps) < self._algorithm.iterations:
            self._round()
        return self._finished()

    def _round(self) -> None:
        """Decide, begin, and let the clock go on to whatever comes next."""
        self.result.events += 1
        busy_until = self._dispatch()
        self._fleet.settle()
        self._look_at_barrier()
        self._sharing.look()
        self._fleet.settle()
        wakes_at = max(self._dispatcher.wakes_at, busy_until)
        until = min(wakes_at, self._events.next_at, self._fleet.next_end, self._learner.ends)
        if until == _NEVER:
            raise SimulationError(self._standstill())
        self._clock.time = max(until, self._clock.time)
        self._events.happen()
        if self._learner.ends <= self._clock.time:
            self._learned()
        for generator in self._fleet.ended():
            for made in generator.decoding.step(0.0):
                self._drawn(generator, made)
            self._fleet.touch(generator)

    def _standstill(self) -> str:
        there = sum(one.is_there for one in self._fleet.places)
        return (
            f"the simulated run stands still at {self._clock.time:.1f} s, in iteration "
            f"{self._learner.iteration}: {there} generators are there, {self._dispatcher.waiting} samples "
            "wait for one, and nothing is to come. Has every generator failed for good?"
        )

    def _dispatch(self) -> float:
        """Let the dispatcher take its turn. Return until when it is busy with that."""
        now, messages = self._clock.time, self._messages
        began = time.thread_time() if messages.measured else 0.0
        dealt = self._dispatcher.turn(now)
        moved = self._dispatcher.moved(now)
        back = self._dispatcher.withdraw()
        took_s = time.thread_time() - began if messages.measured else messages.turn_s if dealt else 0.0
        sent = now + took_s
        for name, jobs in dealt.items():
            self._send(name, jobs, sent + self._delivery_s(name))
        for job, source, target in moved:
            arrives = sent + self._delivery_s(source) + self._delivery_s(target) - messages.delivery_s
            self._move(job, source, target, arrives + messages.handover_s)
        for name, keys in back.items():
            self._ask_back(name, keys, sent + self._delivery_s(name))
        return sent

    def _delivery_s(self, name: str) -> float:
        """Return the seconds of a message from or to a generator."""
        return self._fleet.named[name].delivery_s

    def _send(self, name: str, jobs: Sequence[SampleJob], arrives: float) -> None:
        generator = self._fleet.named[name]
        process, arrives = generator.process, generator.fetch_prompts(jobs, arrives)
        if arrives <= self._clock.time:
            self._take(name, process, jobs)
        else:
            self._events.at(arrives, lambda: self._take(name, process, jobs))

    def _take(self, name: str, process: int, jobs: Sequence[SampleJob]) -> None:
        """Jobs reach their generator. If another process is in its place by now, they are given again."""
        generator = self._fleet.named[name]
        if generator.is_there and generator.process == process:
            for job in jobs:
                generator.decoding.take(job)
            self._fleet.touch(generator)

    def _move(self, job: SampleJob, source: str, target: str, arrives: float) -> None:
        generator, process, now = (
            self._fleet.named[source],
            self._fleet.named[target].process,
            self._clock.time,
        )
        moving = [] if generator.is_there else [job]  # what a dead one had is begun anew
        if generator.is_there:
            self._fleet.touch(generator)
            generator.spend()
            for left in generator.decoding.hand_over([sample_id(*job.key)]):  # none: it is done just now
                part = left.part("simulated", source, now)
                self.result.moves += 1
                self.result.moved_tokens += part.tokens.size
                moving.append(replace(job, part=part))
            if generator.decoding.give_back([sample_id(*job.key)]):  # it is not begun
                moving.append(job)
        for one in moving:
            self._events.at(arrives, lambda one=one: self._arrive(target, process, one))  # type: ignore[misc]

    def _arrive(self, name: str, process: int, job: SampleJob) -> None:
        self._take(name, process, [job])
        self._dispatcher.arrived(job.key)

    def _ask_back(self, name: str, keys: Sequence[SampleKey], arrives: float) -> None:
        generator, process = self._fleet.named[name], self._fleet.named[name].process

        def answer() -> None:
            if not generator.is_there or generator.process != process:
                return
            back = [
                sample_key(one) for one in generator.decoding.give_back([sample_id(*key) for key in keys])
            ]
            self._events.after(
                generator.delivery_s, lambda: self._dispatcher.returned(name, back, self._clock.time)
            )

        self._events.at(arrives, answer)

    def _drawn(self, generator: SimulatedGenerator, made: MadeSample) -> None:
        """A sample has its last token. It counts when it has a reward."""
        reward_s, delivery_s = generator.times.reward_s, generator.delivery_s
        key, tokens, version = made.begun.job.key, len(made.finished.tokens), min(made.begun.versions)
        generator.made += 1
        self._span(generator.name, "sample", made.begun.started_at, self._clock.time, sample_id(*key))
        if not reward_s:
            self._send_sample(key, tokens, version, delivery_s)
            return
        process = generator.process

        def scored() -> None:
            is_there = generator.is_there and generator.process == process
            if is_there or generator.left == process:  # else it is lost, and drawn again
                self._send_sample(key, tokens, version, delivery_s)

        self._events.after(reward_s, scored)

    def _send_sample(self, key: SampleKey, tokens: int, version: int, delivery_s: float) -> None:
        if delivery_s:
            self._events.after(delivery_s, lambda: self._came(key, tokens, version))
        else:
            self._came(key, tokens, version)

    def _came(self, key: SampleKey, tokens: int, version: int) -> None:
        """A sample reaches the dispatcher and the trainer. The first one of its name counts."""
        group, index = key
        self._dispatcher.finished(key, tokens, self._clock.time)
        parts = self._parts.setdefault(group, {}) if group in self._open else None
        if parts is None or index in parts:
            return
        parts[index] = tokens, version
        self._made += 1
        self._tokens += tokens
        if len(parts) == self._algorithm.group_size:
            rows = [parts[number] for number in range(len(parts))]
            self._learner.take(
                WholeGroup(self._open[group], [row[0] for row in rows], [row[1] for row in rows])
            )
            self._learner.go_on()

    def _learned(self) -> None:
        """The learner has done what it had in hand."""
        doing, began = self._learner.doing, self._learner.began_at
        is_step = self._learner.done()
        self._span("learner", doing, began, self._clock.time)
        if is_step:
            self._stepped()
        self._learner.go_on()

    def _stepped(self) -> None:
        iteration, before = self._learner.iteration, self._admitted
        groups, is_last = self._learner.stepped()
        record = _record(iteration, self._steps, [one.prompt.group for one in groups], last=is_last)
        self._steps += 1
        self._taken.add(record)
        self._planner.observe(record)
        self._of_iteration = [*self._of_iteration, *groups]
        if self._balance is not None:
            self._balance.stepped(record, sum(sum(one.answers) for one in groups))
        if is_last:
            self._ended(iteration)
            if self._run.barrier:
                self._behind_barrier = iteration + 1, before
                self._learner.waits_for_weights = True
            else:
                self._publish(iteration + 1)
        self._admit()
        self._learner.begin_step()

    def _ended(self, iteration: int) -> None:
        """An iteration is trained: note it, and forget its groups."""
        groups, self._of_iteration = self._of_iteration, []
        generated, idle_slots_s = self._fleet.spent()
        ages = [iteration - version for group in groups for version in group.versions]
        self.result.steps.append(
            SimulatedStep(
                self._clock.time, [one.prompt.group for one in groups], ages,
                sum(sum(one.answers) for one in groups), dict(self._learner.seconds), generated, idle_slots_s,
                (self._made, self._tokens), sum(one.is_there for one in self._fleet.places),
            )
        )  # fmt: skip
        gone = [group for group in self._open if group < first_open(iteration + 1, self._algorithm)]
        for group in gone:
            del self._open[group]
            self._parts.pop(group, None)
        self._dispatcher.forget(gone)
        self._preemptions.look()

    def _publish(self, version: int) -> None:
        self._events.after(self._run.learner.publish_s, lambda: self._announced(version))

    def _announced(self, version: int) -> None:
        for site, link in self._links.items():
            link.announced(version)
            if link.held == version:
                self._fleet.has(site, version)
            self._fetch(site, link)

    def _fetch(self, site: str, link: SiteLink) -> None:
        if (seconds := link.fetch()) is None:
            return
        began = self._clock.time

        def fetched() -> None:
            self._span(f"link to {site}", "weights", began, self._clock.time)
            self._fleet.has(site, link.fetched())
            self._fetch(site, link)

        self._events.after(seconds, fetched)

    def _look_at_barrier(self) -> None:
        """Publish when all samples that were admitted are drawn; go on when all have the weights."""
        if not self._learner.waits_for_weights:
            return
        if self._behind_barrier is not None:
            version, samples = self._behind_barrier
            if self._made >= samples:
                self._behind_barrier = None
                self._awaited = version
                self._publish(version)
        elif self._fleet.holds(self._awaited):
            self._learner.spend()
            self._learner.waits_for_weights = False
            self._learner.go_on()
        elif (left_s := self._fleet.installed_in_s()) > 0:
            self._events.after(left_s, lambda: None)

    def _admit(self) -> None:
        prompts = self._planner.admit(lambda version: self._ranker)
        self._open |= {prompt.group: prompt for prompt in prompts}
        jobs = [SampleJob(prompt, index) for prompt in prompts for index in range(prompt.size)]
        self._admitted += len(jobs)
        self._dispatcher.admit(jobs, self._clock.time)

    def _span(self, lane: str, kind: str, begin: float, end: float, label: str = "") -> None:
        if self._run.picture_of is None or len(self.result.spans) >= MOST_SPANS:
            return
        late = self._learner.iteration - self._run.picture_of
        if 0 <= late <= 1 + self._algorithm.lookahead:  # samples that are begun in it end later, too
            self.result.spans.append(SimulatedSpan(lane, kind, begin, end, label))

    def _finished(self) -> Simulation:
        result, run = self.result, self._run
        result.link_bytes = {site: link.bytes for site, link in self._links.items()}
        result.link_s = {site: link.seconds for site, link in self._links.items()}
        result.preempted = self._preemptions.count
        result.drawn_again, result.handed_over = self._fleet.drawn_again, self._fleet.handed_over
        there_s = sum(one.there_s for one in self._fleet.places)
        result.generators = there_s / result.ended_at if result.ended_at else 0.0
        prices = {site.name: site.price_per_hour for site in run.sites}
        for one in self._fleet.places:
            one.pay_until(result.ended_at)
            result.cost += one.paid_s / 3600 * prices[one.site]
        result.cost += result.ended_at / 3600 * run.learner_price_per_hour
        return result


def _seconds_of_choices(policy: Policy, messages: MessageTimes) -> Callable[[float], float]:
    choice_s = messages.choice_s
    if messages.measured:
        return as_measured
    return usual_of(policy) if choice_s is None else lambda cpu_s: choice_s


def _record(iteration: int, step: int, groups: Sequence[int], *, last: bool) -> StepRecord:
    """Return a step of the ledger, with one row a group: the planner reads no more of it."""
    count = len(groups)
    whole, small = np.zeros(count, np.int64), np.zeros(count, np.int16)
    return StepRecord(
        run="simulated", trainer_epoch=0, iteration=iteration, step=step, last_of_iteration=last,
        version_in=iteration, version_out=iteration + last, root_out="", recipe="", partitions=small,
        offsets=whole, groups=np.array(groups, np.int64), indexes=small, lengths=whole.astype(np.int32),
        rewards=whole.astype(np.float32), versions=whole.astype(np.int32),
        predicted=whole.astype(np.float32), problem_ids=[""] * count,
        microbatches=np.array([count], np.int32), losses=np.zeros(1), metrics={}, finished_at=0.0,
    )  # fmt: skip

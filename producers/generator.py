"""A generator: takes assignments, and publishes each sample as soon as it is finished and scored.

<run>.assignments ──► decoding: backlog, engine process ──► reward processes ──► <run>.samples
<run>.weights ──► watch ──────────┘ prepared beside decode steps, installed between two, verified by hash
<run>.prompts, <run>.parts ──┘ by position: an assignment names them
<run>.instances ◄── every few seconds: that it is there, what it has, how fast it is

waits for                      unblocked by
first weights                  the trainer
assignments                    the feeder, in which the dispatcher is
weights that a prompt needs    the trainer
in a colocated run, its turn   the trainer
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from infra.bus import BusError, ends_of
from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from infra.roles.turns import OTHERS_TURN, TURN_LOOK_S, EnginesTurn, NoTurns, engines_turn
from infra.tail import Tail
from producers.assigned import Assigned
from producers.drawing import Drawing
from producers.engines.engine import Engine, EngineError, EngineSettings, FarRanksAsked
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from producers.generator_core import Decoding, MadeSample, packed_of
from producers.generator_reports import GeneratorReports, GeneratorState
from producers.rewards import RewardOutcome, RewardPool
from producers.stopping import stopping_of
from producers.weights_watch import WeightsWatch
from schemas.identity import sample_id
from schemas.messages import TRAIN, Sample, shared_fields
from schemas.runspec import RunSpec
from schemas.topics import assignment_partition
from schemas.wire import encode

_SCORES_S = 0.004  # how often rewards are polled while few samples run: somebody may wait for the last
_IDLE_S = 0.2  # how often an idle generator looks whether it shall stop
# A request to the broker costs generator, trainer and broker a millisecond or two each, so samples that
# finish within this time share one. Not when few run, in number or for its slots: then somebody waits for the
# last ones. In sync mode the trainer has nothing else to do.
_HOLD_S, _HOLD_IN_SYNC_S = 0.1, 0.02
_FEW, _FEW_SHARE = 16, 0.5
_LAST_SCORES_S = 3.0  # how long a generator that leaves waits for rewards
_TROUBLE_S = 60.0  # how long the heartbeat names a sample without a reward
_FULL = 0.9  # share of the slots: with so many samples, more would have to wait
_TAIL_SHARE = 0.25  # of the slots: fewer samples than that, with none to come, are the tail of long ones


@dataclass
class _Progress:
    made: int = 0
    tokens: int = 0
    failed_rewards: int = 0
    busy_s: float = 0.0
    slot_s: float = 0.0  # the same for each sample that ran: by `busy_s` it is the mean batch
    full_s: float = 0.0  # of `busy_s`, while nearly all slots were taken
    scoring_s: float = 0.0  # while rewards were awaited

    def add(self, seconds: float, running: int, slots: int) -> None:
        """Count some time, in which so many samples ran."""
        if running:
            self.busy_s += seconds
            self.slot_s += seconds * running
            self.full_s += seconds * (running >= _FULL * slots)


class Rewards(Protocol):
    """Scores completions; see `RewardPool`."""

    def score(self, key: str, problem: str, completion: str) -> None:
        """Queue a completion."""

    def pending(self) -> int:
        """Return how many completions have no score yet."""

    def poll(self) -> list[RewardOutcome]:
        """Return the scores that have come since the last call. Never waits."""

    def close(self) -> None:
        """End the processes."""


class Generator:
    """Runs one engine for a run."""

    def __init__(
        self, context: RoleContext, engine: Engine, rewards: Rewards, to_text: Callable[[np.ndarray], str],
        bell: threading.Event, turn: EnginesTurn | None = None,
    ) -> None:  # fmt: skip
        self._context, self._engine, self._rewards, self._text = context, engine, rewards, to_text
        self._spec = context.spec
        self._decoding = Decoding(context.spec, engine)
        self._scoring: dict[str, MadeSample] = {}
        self._held: list[Sample] = []  # finished and scored, not sent yet
        self._held_since = 0.0
        self._few = min(_FEW, _FEW_SHARE * context.spec.generator.slots)
        self._hold_s = _HOLD_IN_SYNC_S if context.spec.algorithm.mode == "sync" else _HOLD_S
        self._progress = _Progress()
        self._troubled_at = 0.0  # when a sample last had no reward
        self._drawing = Drawing(context.spec.deadlines.progress_s)
        start = secrets.token_hex(8)
        self._moving: list[str] = []  # samples that other generators shall continue
        self._reporting = GeneratorReports(context, start)
        self._assigned = Assigned(context, start)
        self._bell = bell
        self._weights = WeightsWatch(context, bell)
        self._turn: EnginesTurn = turn or NoTurns()
        self._sync = context.spec.algorithm.mode == "sync"
        self._look_s = TURN_LOOK_S if context.spec.placement.takes_turns else _IDLE_S

    def open(self) -> Generator:
        """Begin to hear of assignments and weights. Return itself."""
        context = self._context
        topic, only = context.topics.assignments, assignment_partition(context.name)
        # jobs of an earlier process of this name are given again, once this one has reported
        ends = ends_of(context.bus, topic, only=only)
        reader = context.bus.reader(topic, ends, only=only, patient=True)
        self._assignments = Tail(reader, self._assigned.read, self._bell).open()
        self._weights.open()
        return self

    def run(self) -> None:
        """Work until the run stops this process."""
        try:
            wait = self._context.wait("work", unblocked_by="the feeder and the trainer")
            others = self._context.wait("the learner's turn to end", unblocked_by="the trainer")
            since = time.monotonic()
            while True:
                self._context.check_stop()
                for version in self._weights.take():
                    self._decoding.update(version)
                moved = self._take_assignments()
                if mine := self._is_my_turn():
                    self._hand_over()
                    moved += self._fill()
                if running := self._decoding.running if mine else 0:
                    self._generates()
                    moved += self._step()
                elif self._scoring:
                    self._context.heart.working("scoring rewards")
                    time.sleep(_SCORES_S)  # only rewards are awaited
                moved += self._collect(self._rewards.poll())
                self._publish()
                self._report(drawing=running > 0)
                since, before = time.monotonic(), since
                self._progress.add(since - before, running, self._spec.generator.slots)
                self._progress.scoring_s += (since - before) * bool(self._scoring)
                self._count()
                if mine:
                    others.progress()
                if moved or running or self._scoring:
                    wait.progress()
                elif mine:
                    self._idle()
                    wait.check()
                else:
                    wait.progress()
                    self._rest()
                    others.check()
        finally:
            self._say_goodbye()
            self._rewards.close()
            self._assignments.close()
            self._assigned.close()
            self._weights.close()
            self._engine.close()
            self._turn.close()

    def _is_my_turn(self) -> bool:
        """Whether the engine may draw. In sync mode it first draws all that the present weights may draw."""
        may_rest = not self._sync or self._decoding.is_done
        return self._turn.mine(may_rest=may_rest, rest=self._decoding.rest)

    def _rest(self) -> None:
        """Report that the learner has the turn, and wait a moment."""
        self._context.heart.waiting("the learner's turn to end", unblocked_by="trainer", cause=OTHERS_TURN)
        self._bell.wait(self._look_s)
        self._bell.clear()

    def _idle(self) -> None:
        """Report the wait in the heartbeat, and sleep until something comes or `_IDLE_S` has passed."""
        heart, needs = self._context.heart, self._decoding.needs
        if self._decoding.version < 0:
            heart.waiting("the first weights", unblocked_by="trainer", cause="weights")
        elif needs is None:
            heart.waiting("assignments", unblocked_by="feeder")
        else:
            heart.waiting(f"weights {needs}", unblocked_by="trainer", cause="weights")
        self._bell.wait(self._look_s)
        self._bell.clear()

    def _take_assignments(self) -> int:
        found = 0
        for work in self._assignments.take():
            if work.tell:
                self._reporting.tell()
            self._moving += work.moving
            if work.withdrawn:
                self._reporting.gives_back(self._decoding.give_back(work.withdrawn))
            fresh = sum(
                self._decoding.take(job) for job in work.jobs if sample_id(*job.key) not in self._scoring
            )
            if fresh:
                self._reporting.took(time.time() - work.sent_at)
            found += fresh
        return found

    def _hand_over(self) -> None:
        """Send the tokens of samples that move, for the generators that continue them."""
        if not self._moving or not self._decoding.is_verified:
            return
        moving, self._moving = self._moving, []
        self._send_parts(moving)
        if back := self._decoding.give_back(moving):  # they are not begun, so there is no part to wait for
            self._reporting.gives_back(back)

    def _send_parts(self, names: list[str]) -> int:
        """Send the tokens of begun samples, and have them no more. Return how many there were."""
        left = self._decoding.hand_over(names)
        for one in left:
            part = one.part(self._context.run, self._context.name, time.time())
            key = sample_id(part.group, part.index)
            self._context.writer.send(self._context.topics.parts, encode(part), key=key)
        return len(left)

    def _fill(self) -> int:
        installs, paused = self._decoding.installs, self._decoding.pause_s
        count = self._decoding.fill()
        if self._decoding.installs > installs:
            self._context.heart.recount("installing weights", self._decoding.pause_s - paused)
        return count

    def _generates(self) -> None:
        few = self._decoding.running < _TAIL_SHARE * self._spec.generator.slots
        tail = few and not self._decoding.queued
        self._context.heart.working("generating", cause="generating the long tail" if tail else "")

    def _step(self) -> int:
        made = self._decoding.step(self._patience())
        for sample in made:
            name = sample.finished.id
            self._scoring[name] = sample
            self._rewards.score(name, sample.begun.job.prompt.problem, self._text(sample.finished.tokens))
        return len(made)

    def _patience(self) -> float:
        """Return how long to wait for the engine, in seconds.

        New assignments and weights end the wait by the bell.
        """
        if self._rewards.pending() and self._decoding.running < self._few:
            return _SCORES_S
        return min(self._hold_s if self._held or self._rewards.pending() else _IDLE_S, self._look_s)

    def _collect(self, scores: list[RewardOutcome]) -> int:
        """Turn scored completions into samples, to be sent."""
        for score in scores:
            sample = self._sample(self._scoring.pop(score.key), score)
            if not self._held:
                self._held_since = time.monotonic()
            self._held.append(sample)
            self._progress.made += 1
            self._progress.tokens += sample.true_length
            if score.error:
                self._progress.failed_rewards += 1
                self._context.log.warning("sample %s has no reward: %s", score.key, score.error)
                self._context.heart.trouble = f"sample {score.key} has no reward: {score.error}"[:1_000]
                self._troubled_at = time.monotonic()
        return len(scores)

    def _publish(self) -> None:
        """Send the finished samples, if enough time has passed or few are running."""
        if self._decoding.running >= self._few and time.monotonic() - self._held_since < self._hold_s:
            return
        self._publish_now()

    def _publish_now(self) -> None:
        for sample in self._held:
            self._context.writer.send(
                self._context.topics.samples, encode(sample), key=sample.id, partition=sample.length_class
            )
        self._held.clear()

    def _sample(self, made: MadeSample, score: RewardOutcome) -> Sample:
        begun, finished = made.begun, made.finished
        prompt = begun.job.prompt
        return Sample(
            **shared_fields(prompt), index=begun.job.index, attempt=0, prompt_tokens=prompt.tokens,
            tokens=finished.tokens, logprobs=finished.logprobs,
            version_starts=np.array(begun.version_starts, dtype=np.int32),
            versions=np.array(begun.versions, dtype=np.int32), roots=begun.roots, seed=begun.seed,
            finish=finished.finish, reward=score.total, reward_parts=score.parts, reward_error=score.error,
            generator=self._context.name, started_at=begun.started_at, finished_at=made.finished_at,
            scored_at=time.time(), routes=packed_of(finished) if prompt.purpose == TRAIN else b"",
        )  # fmt: skip

    def _report(self, *, leaving: bool = False, handed: int = 0, drawing: bool = False) -> None:
        """Report to the dispatcher, if it is time. `drawing`: whether the engine has to draw tokens now."""
        state = lambda: self._state(leaving, drawing)  # noqa: E731
        self._reporting.report(state, leaving=leaving, handed=handed)

    def _state(self, leaving: bool, drawing: bool) -> GeneratorState:
        scoring = [(made.begun.job.key, made.finished.tokens.size) for made in self._scoring.values()]
        held = self._decoding.held() + scoring
        if not leaving:
            self._drawing.saw(held, running=self._decoding.running if drawing else 0)
        return GeneratorState(self._engine.pace(), self._decoding.version, held)

    def _say_goodbye(self) -> None:
        """Tell the dispatcher, so that it reassigns our samples at once and not only after a long silence."""
        with contextlib.suppress(BusError):
            self._report(leaving=True, handed=self._leave_tokens() if self._context.stop.is_set() else 0)

    def _leave_tokens(self) -> int:
        """Publish what is finished and hand over what is begun, so that others go on with it.

        Return how many samples were handed over. In sync mode it is none if their bits would be others.
        """
        try:
            until = time.monotonic() + _LAST_SCORES_S
            while self._scoring and time.monotonic() < until:
                if not self._collect(self._rewards.poll()):
                    time.sleep(_SCORES_S)
            self._publish_now()
            on_policy = self._spec.algorithm.mode == "sync"
            if not self._decoding.is_verified or (on_policy and not self._engine.pace().keeps_bits):
                return 0
            return self._send_parts(self._decoding.begun)
        except EngineError as error:
            self._context.log.warning("what is begun can't be handed over: %s", error)
            return 0

    def _count(self) -> None:
        if self._context.heart.trouble and time.monotonic() > self._troubled_at + _TROUBLE_S:
            self._context.heart.trouble = ""
        pace = self._engine.pace()
        step_s, sample_s = pace.line()
        self._context.heart.counters.update(
            step_s=step_s, sample_s=sample_s,
            drafted=pace.drafted, accepted=pace.accepted, shared=pace.shared,
            made=self._progress.made, tokens=self._progress.tokens, queued=self._decoding.queued,
            drawn=self._drawing.tokens,
            running=self._decoding.running + len(self._scoring), busy_s=self._progress.busy_s,
            slot_s=self._progress.slot_s, full_s=self._progress.full_s,
            # it grows, so that a run goes on while a reward waits: rewards have a deadline of their own
            awaited_rewards=int(self._progress.scoring_s),
            failed_rewards=self._progress.failed_rewards, version=self._decoding.version,
            installs=self._decoding.installs, pause_s=self._decoding.pause_s,
        )  # fmt: skip


def _engines_spec(context: RoleContext) -> RunSpec:
    """Return the run's settings as the engine of this generator has them."""
    chosen = context.spec.generator
    if not isinstance(chosen, EngineSettings):  # code that is not ours: only the engine process loads it
        return context.spec
    return context.spec.model_copy(update={"generator": chosen.for_generator(context.number)})


def _far_ranks(context: RoleContext) -> FarRanksAsked | None:
    """Return how ranks of other machines find this generator's engine; None if it has none."""
    wanted = context.spec.placement.engine_ranks.elsewhere
    if not wanted:
        return None
    context.heart.working(  # it loads for most of that time, which is work
        f"starting: {wanted} ranks come by `streamrl join {context.run} --engine-ranks {wanted} "
        f"--store {context.store.url}`",
        cause="starting",
    )
    return FarRanksAsked(context.store.url, context.run, context.number)


def body(context: RoleContext) -> None:
    """Start the engine, and run the generator."""
    spec = context.spec
    began = time.monotonic()
    bell = threading.Event()
    options = EngineOptions(
        model=context.record.model, spec=_engines_spec(context).model_dump_json(), far=_far_ranks(context)
    )
    turn = engines_turn(context)
    engine = RemoteEngine(options, bell, deadline_s=spec.deadlines.start_s, inherits=turn.descriptors).open()
    to_text = stopping_of(context.record.model, spec).text
    generator = Generator(context, engine, RewardPool(spec.task), to_text, bell, turn).open()
    engine.wait_until_ready(context.check_stop)
    context.loaded()
    context.log.info("engine ready after %.1f s", time.monotonic() - began)
    generator.run()


if __name__ == "__main__":
    sys.exit(run_role("generator", body))

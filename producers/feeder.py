"""The feeder: admits prompts at the pace of the ledger, and has versions evaluated on held-out problems.

    ledger ──► planner ──► <run>.prompts          waits for: a step / unblocked by the trainer
                  ├─ resampling: other groups for those whose rewards are all alike
                  ├─ ranker, in a thread of its own: learns the lengths of what was trained
                  ├─ dispatcher, in a thread of its own: which generator makes which sample
                  └─ evaluations: held-out prompts ──► generators ──► samples ──► <run>.evals
    <run>.samples ──► read once for all of these, in a thread of its own

Its whole state follows from the log. Started again, it reads the records since its newest snapshot, then
plans and sends the same prompts that `<run>.prompts` still lacks. A feeder that finds a newer start of itself
ends.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from infra.bus import ends_of
from infra.epochs import begin
from infra.logs import at_step
from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from producers.chat import Tokenize, load_tokenize_prompt, tokens_of
from producers.dispatch.jobs import RecordPlace
from producers.dispatch.recovery import Past
from producers.dispatch.service import Dispatching, FinishedSample
from producers.evaluations import Evaluations
from producers.ledger_steps import Beginnings, Steps
from producers.outbox import Outbox
from producers.ranking import Ranking, kept_versions
from producers.resampling import Resampling
from producers.restart import look_at, misfit
from producers.sample_feed import AdmittedSample, SampleFeed
from producers.snapshots import Announced, FeederSnapshot, Keeper, Opened, Positions, Snapshots
from producers.tasks import Problem, TaskError, load_problems
from schemas.messages import EVAL, TRAIN, Prompt, RankerAnnouncement, StepRecord
from schemas.wire import encode

_POLL_S = 0.25
_MOST_EVALUATIONS = 8  # open ones, in async mode: with more, admission waits for the generators


class Feeder:
    """Runs the planner, and sends the prompts that it plans."""

    def __init__(
        self, context: RoleContext, train: Sequence[Problem], held_out: Sequence[Problem], tokenize: Tokenize
    ) -> None:
        self._context, self._spec, self._held_out = context, context.spec, held_out
        self._train, self._tokenize = train, tokenize

    def open(self) -> Feeder:
        """Take up the run where its topics and the newest snapshot say that it is. Return itself."""
        context = self._context
        self._epoch = begin(context.store, context.run, "feeder")
        context.feeder_epoch = self._epoch.number
        snapshots = Snapshots(context.store, context.run, context.log.warning)
        snapshot = snapshots.newest(lambda one: misfit(context, one))
        self._found = found = look_at(context, snapshot, list(self._train), self._tokenize)
        self._planner, self._behind, self._roots = found.planner, found.behind, found.roots
        self._announced = snapshot.announced if snapshot else Announced()
        self._feed = SampleFeed(context, found.start, found.trained, found.roots).open()
        self._feed.admitted(one.prompt for one in found.prompts.values())
        wanted = self._planner.first_incomplete(found.trained)
        self._ranking = Ranking(context, self._planner.question, self._feed, wanted=wanted).open()
        self._resampling = Resampling(context, self._feed, found.trained)
        unfit = found.letters.of(context.topics.samples)
        self._evaluations = Evaluations(
            context, self._feed, done=found.evaluated, letters=unfit, position=found.evals,
            fence=self._epoch.check,
        ).connect()  # fmt: skip
        self._outbox = Outbox(
            context, sent=[one.prompt for one in found.prompts.values()], iterations=found.iterations
        ).open()
        finished = self._feed.subscribe(finished_of)
        self._feed.read_back()
        done = {one.key: one.length for one in finished.take() if one.place not in unfit}
        past = Past(done, found.trained, unfit, found.letters.position)
        self._dispatching = Dispatching(context, list(found.prompts.values()), past, finished).open()
        self._steps = self._begin_steps(snapshot)
        self._keeper = Keeper(snapshots, context.log.warning).open()
        self._feed.follow()
        return self

    def _begin_steps(self, snapshot: FeederSnapshot | None) -> Steps:
        """Open the ledger behind the snapshot.

        The ranker first learns earlier steps that its stored state lacks.
        """
        state = self._planner.state()
        self._beginnings = Beginnings(kept_versions(self._context), snapshot.began if snapshot else {})
        if snapshot is None:
            return Steps(self._context).open()
        began = self._beginnings.at(self._ranking.begins)
        if began is not None and self._ranking.begins < state.version:
            earlier = Steps(self._context, began.position, began.step).open()
            try:
                for step in earlier.up_to(snapshot.ledger):
                    self._ranking.trained(step)
            finally:
                earlier.close()
        return Steps(self._context, snapshot.ledger, state.steps).open()

    def run(self) -> None:
        """Run until the last iteration is trained and its weights are evaluated."""
        try:
            self._feed_on()
        finally:
            self._keeper.close()
            self._dispatching.close()
            self._ranking.close()
            self._feed.close()
            self._outbox.close()
            self._evaluations.close()
            self._steps.close()

    def _feed_on(self) -> None:
        self._catch_up()
        while True:
            self._begin_iteration(self._planner.version)
            if self._planner.version >= self._spec.algorithm.iterations:
                self._collect_evaluations(0)
                return
            self._next_iteration()

    def _begin_iteration(self, version: int) -> None:
        """Evaluate the new version, admit groups, drop finished ones, and offer a snapshot.

        `version` iterations are trained.
        """
        at_step(version)
        self._dispatching.trained(version, self._evaluations.open)
        self._feed.trained(version)
        self._roots.trained(version)
        self._evaluate(version)
        self._send(self._planner.admit(self._ranking.at))
        self._keep()

    def _catch_up(self) -> None:
        """Read the ledger up to its end, and send again the admitted prompts that the log has lost."""
        first = self._planner.version
        for step in self._steps.up_to(self._steps.end()):
            self._context.check_stop()
            self._take(step)
        if self._planner.version < self._found.trained:  # the ledger has lost some of their steps
            self._planner.begin_at(self._found.trained)
            self._steps.number = self._planner.steps
            self._ranking.reached(self._found.trained)
        self._send(self._planner.again(self._planner.open_groups() - self._found.prompts.keys()))
        self._resume_evaluations(first)
        self._found.prompts.clear()

    def _resume_evaluations(self, first: int) -> None:
        """Reopen evaluations that were open and, in async mode, open those due since version `first`."""
        found, current = self._found, self._planner.version
        known = {one.version: one for one in found.snapshot.evaluations} if found.snapshot else {}
        asked = {one.prompt.iteration for one in found.prompts.values() if one.prompt.purpose == EVAL}
        passed = set(range(first, current)) if self._is_async and found.snapshot else set()
        for version in sorted({*known, *asked, *passed}):
            if self._evaluations.wants(version) and (
                version == current or version in known or self._is_async
            ):
                was = known.get(version)
                self._begin_evaluation(
                    version, was.opened if was else found.opened, was.samples if was else found.start
                )

    @property
    def _is_async(self) -> bool:
        return self._spec.algorithm.mode == "async"

    def _take(self, step: StepRecord) -> bool:
        """Take a step of the ledger. Return whether it ended an iteration."""
        self._beginnings.take(step, self._steps.position)
        self._behind.take(step)
        self._roots.learn(step)
        ended = self._planner.observe(step)
        if self._spec.algorithm.mode != "offline":  # offline, steps are about another run's samples
            self._ranking.trained(step)
            self._ranking.reached(self._planner.version)
        return ended

    def _next_iteration(self) -> None:
        wait = self._context.wait("the next optimizer step in the ledger", unblocked_by="the trainer")
        self._context.heart.waiting(
            f"step of iteration {self._planner.version}", unblocked_by="trainer", cause="optimizer steps"
        )
        while True:
            self._context.check_stop()
            self._dispatching.check()
            if (step := self._steps.next(_POLL_S)) is not None:
                wait.progress()
                if self._take(step):
                    self._epoch.check()
                    self._context.heart.working("admitting")
                    return
            if self._evaluations.collect():
                wait.progress()
            self._send_instead()
            wait.check()

    def _send_instead(self) -> None:
        """Send other groups in the place of groups that taught nothing."""
        version = self._planner.version
        for place in self._resampling.found(version):
            ranker = self._ranking.at(version)
            self._send([self._planner.instead(place.group, place.iteration, place.mini, ranker)])

    def _send(self, prompts: Sequence[Prompt]) -> None:
        if not (fresh := self._outbox.fresh(prompts)):
            return
        self._epoch.check()
        if fresh[0].purpose == TRAIN:
            self._announce(fresh[0], min(prompt.group for prompt in fresh))
        self._dispatching.admit(self._outbox.send(fresh))  # before any of their samples can arrive
        self._feed.admitted(fresh)

    def _announce(self, prompt: Prompt, first_group: int) -> None:
        """Announce the ranker and the class edges in force from a group on, if they have changed."""
        now = Announced(predictor=prompt.predictor, edges=prompt.edges)
        if now == self._announced:
            return
        self._announced = now
        version = self._planner.version
        score = self._ranking.scores.get(version - 1)
        announcement = RankerAnnouncement(
            run=self._context.run, predictor=prompt.predictor, version=version,
            state=self._ranking.key(version), edges=prompt.edges, first_group=first_group,
            recall=list(score.recall) if score else [], error=score.error if score else float("nan"),
            announced_at=time.time(),
        )  # fmt: skip
        self._context.writer.send(self._context.topics.ranker, encode(announcement), key=prompt.predictor)

    def _keep(self) -> None:
        """Forget finished iterations and evaluations, and offer a snapshot of the rest."""
        version = self._planner.version
        self._outbox.forget(version, self._evaluations.open)
        self._evaluations.forget(version)
        settled = self._behind.at(version)
        if self._spec.algorithm.mode == "offline":  # all samples of the run are of evaluations
            settled = ends_of(self._context.bus, self._context.topics.samples)
        iterations = self._outbox.iterations
        ends = Opened() if iterations or self._evaluations.open else self._outbox.ends()
        self._keeper.offer(
            FeederSnapshot(
                run=self._context.run, epoch=self._epoch.number, planner=self._planner.state(),
                ledger=self._steps.position, began=self._beginnings.known, samples=settled,
                samples_of=self._behind.pending, iterations=iterations, ends=ends,
                evals=self._evaluations.position, evaluated=sorted(self._evaluations.done),
                evaluations=self._evaluations.state(), announced=self._announced,
                roots=self._roots.inherited,
            )
        )  # fmt: skip

    def _evaluate(self, version: int) -> None:
        """Have a version evaluated by its own weights. Only async mode goes on before the result is there."""
        if self._evaluations.wants(version):
            samples = ends_of(self._context.bus, self._context.topics.samples)
            self._begin_evaluation(version, self._outbox.ends(), samples)
        self._collect_evaluations(_MOST_EVALUATIONS if self._is_async else 0)

    def _begin_evaluation(self, version: int, opened: Opened, samples: Positions) -> None:
        """Send a version's held-out prompts."""
        learned = 0 if self._spec.algorithm.mode == "offline" else self._planner.version
        prompts = self._planner.evaluate(version, self._held_out, self._ranking.at(learned))
        known = self._found.prompts
        # prompts that are on the topic already are taken as they are
        prompts = [known[one.group].prompt if one.group in known else one for one in prompts]
        self._evaluations.begin(version, prompts, opened, samples)
        self._send(prompts)

    def _collect_evaluations(self, most: int) -> None:
        """Wait until at most `most` evaluations are open."""
        self._evaluations.collect()
        if len(self._evaluations.open) <= most:
            return
        wait = self._context.wait(
            f"held-out samples of version {min(self._evaluations.open)}", unblocked_by="the generators"
        )
        while len(self._evaluations.open) > most:
            self._context.check_stop()
            self._dispatching.check()
            version = min(self._evaluations.open)
            self._context.heart.waiting(
                f"evaluation of version {version}", unblocked_by="generators", cause="held-out samples"
            )
            wait.progress() if self._evaluations.collect(_POLL_S) else wait.check()
            self._send_instead()
        self._context.heart.working("admitting")


def finished_of(taken: AdmittedSample) -> FinishedSample | None:
    """Return a fit sample for the dispatcher. None if unfit: it is made again."""
    if taken.fault:
        return None
    sample, place = taken.sample, RecordPlace(taken.record.partition, taken.record.offset)
    return FinishedSample(taken.key, sample.true_length, place, sample.generator, sample.finished_at)


def that_fit(
    problems: Sequence[Problem], tokenize: Tokenize, longest: int, log: logging.Logger
) -> list[Problem]:
    """Return the problems whose prompts have 1 to `longest` tokens.

    Logs how many are left out; raises TaskError if none is left.
    """
    fit = [problem for problem in problems if 0 < len(tokens_of(problem, tokenize)) <= longest]
    if not fit:
        raise TaskError(f"no problem has a prompt of 1 to {longest} tokens (sampling.max_prompt_tokens)")
    if len(fit) < len(problems):
        log.warning(
            "%d of %d problems are left out: their prompts have no token, or more than %d "
            "(sampling.max_prompt_tokens)", len(problems) - len(fit), len(problems), longest,
        )  # fmt: skip
    return fit


def body(context: RoleContext) -> None:
    """Load the problems, and run the feeder."""
    spec, record = context.spec, context.record
    tokenize = load_tokenize_prompt(record.model, spec.task, record.created_at)
    longest = spec.sampling.max_prompt_tokens
    held_out: list[Problem] = []
    if spec.evaluation.problems:
        held_out = load_problems(spec, spec.task.held_out_split)[: spec.evaluation.problems]
        held_out = that_fit(held_out, tokenize, longest, context.log)
    train = that_fit(load_problems(spec, spec.task.train_split), tokenize, longest, context.log)
    context.loaded()
    context.log.info("the task has %d problems to train, and %d held out", len(train), len(held_out))
    Feeder(context, train, held_out, tokenize).open().run()


if __name__ == "__main__":
    sys.exit(run_role("feeder", body))

"""The feeder: admits prompts at the pace of the ledger, and has weights evaluated on held-out problems.

    ledger ──► planner ──► <run>.prompts          waits for: a step / unblocked by the trainer
                  ├─ resampling: other groups for those whose rewards are all alike
                  ├─ ranker, in a thread of its own: learns lengths from <run>.samples
                  ├─ dispatcher, in a thread of its own: which generator makes which sample
                  └─ evaluation: held-out prompts ──► generators ──► samples ──► <run>.evals
                                                  waits for: samples / unblocked by the generators

It keeps no state of its own: started again, it reads the ledger, plans what `<run>.prompts` lacks as it would
have been planned, and sends that.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

import numpy as np

from infra.bus import Reader, ends_of, read_all
from infra.logs import at_step
from infra.process import Context, run_role
from producers.dispatch.recovery import look_back
from producers.dispatch.service import Dispatching
from producers.jobs import Place, Placed
from producers.planner import Planner, Tokenize
from producers.ranker.ranking import Ranking
from producers.resampling import Resampling
from producers.tasks import Problem, TaskError, load_problems
from producers.tokenizing import load_tokenize
from schemas.messages import EVAL, TRAIN, Evaluation, Prompt, RankerAnnouncement, Sample, StepRecord
from schemas.wire import Unreadable, decode, encode

_POLL_S = 0.25


class Feeder:
    """Sends what the planner plans."""

    def __init__(
        self, context: Context, train: Sequence[Problem], held_out: Sequence[Problem], tokenize: Tokenize
    ) -> None:
        self._context, self._held_out = context, held_out
        self._spec = context.spec
        self._deadline = context.spec.deadlines.progress_s
        bus, topics = context.bus, context.topics
        placed = [
            Placed(decode(record.value, Prompt), Place(record.partition, record.offset))
            for record in read_all(bus, topics.prompts, deadline_s=self._deadline)
        ]
        prompts = [one.prompt for one in placed]
        self._sent = {prompt.group for prompt in prompts}
        evals = read_all(bus, topics.evals, deadline_s=self._deadline)
        self._evaluated = {decode(record.value, Evaluation).version for record in evals}
        self._ledger = bus.reader(topics.ledger)
        steps = [
            decode(record.value, StepRecord)
            for record in read_all(bus, topics.ledger, deadline_s=self._deadline)
        ]
        self._planner = Planner(context.run, self._spec, train, tokenize, prompts)
        past = look_back(context, steps)
        wanted = self._planner.first_incomplete(past.trained)
        self._ranking = Ranking(context, self._planner.question, steps, wanted=wanted)
        self._resampling = Resampling(context, steps, past.trained, prompts)
        self._announced: tuple[str, list[float]] = ("", [])
        self._dispatching = Dispatching(context, placed, past)

    def run(self) -> None:
        """Until the last iteration is trained and its weights are evaluated."""
        try:
            self._feed()
        finally:
            self._dispatching.close()
            self._ranking.close()
            self._resampling.close()

    def _feed(self) -> None:
        self._catch_up()
        while True:
            version = self._planner.version
            at_step(version)
            self._dispatching.trained(version)
            if self._wants_evaluation(version):
                self._evaluate(version)
            self._send(self._planner.admit(self._ranking.at))
            if version >= self._spec.algorithm.iterations:
                return
            self._next_iteration()

    def _catch_up(self) -> None:
        """Plan again what was planned before, as the ledger grew."""
        ends = self._ledger.end_offsets()
        self._send(self._planner.admit(self._ranking.at))
        while self._ledger.positions()[0] < ends[0]:
            for record in self._ledger.poll(_POLL_S, most=1):
                if self._planner.observe(decode(record.value, StepRecord)):
                    self._send(self._planner.admit(self._ranking.at))

    def _next_iteration(self) -> None:
        wait = self._context.wait("the next optimizer step in the ledger", unblocked_by="the trainer")
        self._context.heart.waiting(f"step of iteration {self._planner.version}", unblocked_by="trainer")
        while True:
            self._context.check_stop()
            self._dispatching.check()
            for record in self._ledger.poll(_POLL_S, most=1):
                wait.progress()
                if self._planner.observe(decode(record.value, StepRecord)):
                    self._context.heart.working("admitting")
                    return
            self._send_instead()
            wait.check()

    def _send_instead(self) -> None:
        """Other groups in the place of those that told nothing."""
        version = self._planner.version
        for place in self._resampling.found(version):
            ranker = self._ranking.at(version)
            self._send([self._planner.instead(place.group, place.window, place.mini, ranker)])

    def _send(self, prompts: Sequence[Prompt]) -> None:
        fresh = [prompt for prompt in prompts if prompt.group not in self._sent]
        if fresh and fresh[0].purpose == TRAIN:
            self._announce(fresh[0], min(prompt.group for prompt in fresh))
        sent = []
        for prompt in fresh:
            record = self._context.writer.send(
                self._context.topics.prompts,
                encode(prompt),
                key=str(prompt.group),
                partition=prompt.length_class,
            )
            sent.append((prompt, record))
            self._sent.add(prompt.group)
        if fresh:
            self._context.writer.flush(self._deadline)
            self._dispatching.admit(
                [Placed(prompt, Place(prompt.length_class, record.offset())) for prompt, record in sent]
            )
            self._resampling.admitted(fresh)
            counters = self._context.heart.counters
            counters["admitted"] = counters.get("admitted", 0) + sum(prompt.size for prompt in fresh)

    def _announce(self, prompt: Prompt, first_group: int) -> None:
        """Say which ranker and which classes are in force from a group on, if they have changed."""
        if (prompt.predictor, prompt.edges) == self._announced:
            return
        self._announced = prompt.predictor, prompt.edges
        version = self._planner.version
        score = self._ranking.scores.get(version - 1)
        announcement = RankerAnnouncement(
            run=self._context.run, predictor=prompt.predictor, version=version,
            state=self._ranking.key(version), edges=prompt.edges, first_group=first_group,
            recall=list(score.recall) if score else [], error=score.error if score else float("nan"),
            announced_at=time.time(),
        )  # fmt: skip
        self._context.writer.send(self._context.topics.ranker, encode(announcement), key=prompt.predictor)

    def _wants_evaluation(self, version: int) -> bool:
        return self._spec.evaluates(version) and version not in self._evaluated

    def _evaluate(self, version: int) -> None:
        """Have `version` sampled on the held-out problems, and say what it earned."""
        learned = 0 if self._spec.algorithm.mode == "offline" else version  # it has nothing to learn from
        prompts = self._planner.evaluate(version, self._held_out, self._ranking.at(learned))
        resumed = any(prompt.group in self._sent for prompt in prompts)
        start = {} if resumed else ends_of(self._context.bus, self._context.topics.samples)
        self._send(prompts)
        wanted = {(prompt.group, index) for prompt in prompts for index in range(prompt.size)}
        reader = self._context.bus.reader(self._context.topics.samples, start)
        try:
            found = self._collect(reader, wanted, version)
        finally:
            reader.close()
        ordered = [found[key] for key in sorted(found, reverse=True)]
        rewards = np.array([sample.reward for sample in ordered], dtype=np.float32)
        evaluation = Evaluation(
            run=self._context.run, version=version, problem_ids=[sample.problem_id for sample in ordered],
            rewards=rewards, lengths=np.array([sample.true_length for sample in ordered], dtype=np.int32),
            predicted=np.array([sample.predicted for sample in ordered], dtype=np.float32),
            failed=int(np.isnan(rewards).sum()), finished_at=time.time(),
            newest=max(int(sample.versions[-1]) for sample in ordered),
        )  # fmt: skip
        self._context.writer.send(self._context.topics.evals, encode(evaluation), key=str(version))
        self._context.writer.flush(self._deadline)
        self._evaluated.add(version)
        self._context.log.info(
            "version %d earns %.3f on %d held-out samples", version, float(np.nanmean(rewards)), len(ordered)
        )

    def _collect(
        self, reader: Reader, wanted: set[tuple[int, int]], version: int
    ) -> dict[tuple[int, int], Sample]:
        found: dict[tuple[int, int], Sample] = {}
        wait = self._context.wait(f"held-out samples of version {version}", unblocked_by="the generators")
        while len(found) < len(wanted):
            self._context.check_stop()
            self._dispatching.check()
            self._context.heart.waiting(f"evaluation of version {version}", unblocked_by="generators")
            before = len(found)
            for record in reader.poll(_POLL_S):
                try:
                    sample = decode(record.value, Sample)
                except Unreadable:
                    continue  # the trainer reports it
                key = (sample.group, sample.index)
                if sample.purpose == EVAL and sample.run == self._context.run and key in wanted:
                    found.setdefault(key, sample)
            wait.progress() if len(found) > before else wait.check()
        self._context.heart.working("admitting")
        return found


def that_fit(
    problems: Sequence[Problem], tokenize: Tokenize, longest: int, log: logging.Logger
) -> list[Problem]:
    """The problems whose prompts are not empty and not too long; says how many are left out."""
    fit = [problem for problem in problems if 0 < len(tokenize(problem["prompt"])) <= longest]
    if not fit:
        raise TaskError(f"no problem has a prompt of 1 to {longest} tokens (sampling.max_prompt_tokens)")
    if len(fit) < len(problems):
        log.warning(
            "%d of %d problems are left out: their prompts have no token, or more than %d "
            "(sampling.max_prompt_tokens)", len(problems) - len(fit), len(problems), longest,
        )  # fmt: skip
    return fit


def body(context: Context) -> None:
    """What the feeder does."""
    spec, tokenize = context.spec, load_tokenize(context.record.model)
    longest = spec.sampling.max_prompt_tokens
    held_out: list[Problem] = []
    if spec.evaluation.problems:
        held_out = load_problems(spec, spec.task.held_out_split)[: spec.evaluation.problems]
        held_out = that_fit(held_out, tokenize, longest, context.log)
    train = that_fit(load_problems(spec, spec.task.train_split), tokenize, longest, context.log)
    context.loaded()
    context.log.info("%d problems, %d held out", len(train), len(held_out))
    Feeder(context, train, held_out, tokenize).run()


if __name__ == "__main__":
    sys.exit(run_role("feeder", body))

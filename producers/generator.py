"""A generator: assignments in, samples out, each published the moment it is finished and scored.

<run>.assignments ──► backlog ──► engine process ──► reward processes ──► <run>.samples
<run>.weights ──► watch ──────────┘ installed between two decode steps, verified by hash
<run>.instances ◄── twice a second: that it is there, what it has, how fast it is

waits for                      unblocked by
first weights                  the trainer
assignments                    the feeder, in which the dispatcher is
weights that a prompt needs    the trainer
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infra.bus import BusError, ends_of
from infra.logs import at_step
from infra.process import Context, run_role
from infra.tail import Tail
from infra.waiting import Wait
from infra.weights.errors import WeightsError
from producers.backlog import Backlog
from producers.dispatch import REPORT_S
from producers.engines.base import Engine, Finished, Request
from producers.engines.engine_process import EngineOptions
from producers.engines.remote import RemoteEngine
from producers.jobs import Job
from producers.rewards import RewardPool, Score
from producers.tokenizing import load_to_text
from producers.weights_watch import Version, watch_weights
from schemas.identity import sample_id, sample_key, sampling_seed
from schemas.messages import TRAIN, Assignment, InstanceReport, Prompt, Sample
from schemas.topics import assignment_partition
from schemas.wire import Unreadable, decode, encode

_SCORES_S = 0.004  # how often the reward processes are asked, when somebody may wait for what they have
_IDLE_S = 0.2  # how often an idle generator looks whether it shall stop
# A request to the broker costs generator, trainer and broker a millisecond or two each: samples that finish
# within this time share one. Not when few are running: then somebody waits for the last ones.
_HOLD_S = 0.03
_FEW = 16


@dataclass
class _Running:
    job: Job
    seed: int
    started_at: float
    version_starts: list[int]
    versions: list[int]
    roots: list[str]
    finished: Finished | None = None
    finished_at: float = 0.0


@dataclass
class _Progress:
    made: int = 0
    tokens: int = 0
    failed_rewards: int = 0
    busy_s: float = 0.0


class Generator:
    """Runs one engine."""

    def __init__(
        self, context: Context, engine: Engine, to_text: Callable[[np.ndarray], str], bell: threading.Event
    ) -> None:
        self._context, self._engine, self._text = context, engine, to_text
        self._spec = context.spec
        self._deadline = context.spec.deadlines.progress_s
        self._version: Version | None = None
        self._running: dict[str, _Running] = {}
        self._generating = 0  # of the running ones, those that the engine has
        self._held: list[Sample] = []  # finished, not sent yet
        self._held_since = 0.0
        self._progress = _Progress()
        self._backlog = Backlog()
        self._start_id = secrets.token_hex(8)
        self._returned: list[str] = []
        self._report_at = 0.0
        self._bell = bell
        topic, only = context.topics.assignments, assignment_partition(context.name)
        # what was given to a process of this name before is given again: this one has not reported yet
        ends = ends_of(context.bus, topic, only=only)
        self._assignments = Tail(
            context.bus.reader(topic, ends, only=only), lambda records: records, self._bell
        )
        self._weights = watch_weights(context, self._bell)
        self._rewards = RewardPool(self._spec.task)

    def run(self) -> None:
        """Until told to stop."""
        try:
            wait = Wait("work", unblocked_by="the feeder and the trainer", deadline_s=self._deadline)
            since = time.monotonic()
            while True:
                self._context.check_stop()
                for version in self._weights.take():
                    self._install(version)
                moved = self._take_assignments() + self._submit()
                if busy := self._generating > 0:
                    moved += self._step()
                elif self._running:
                    time.sleep(_SCORES_S)  # only rewards are outstanding
                moved += self._collect(self._rewards.poll())
                self._publish()
                self._report()
                since, before = time.monotonic(), since
                self._progress.busy_s += (since - before) * busy
                self._count()
                if moved or self._running:
                    wait.progress()
                else:
                    self._idle()
                    wait.check()
        finally:
            self._say_goodbye()
            self._rewards.close()
            self._assignments.close()
            self._weights.close()
            self._engine.close()

    def _idle(self) -> None:
        """Say what is awaited, until something comes."""
        heart, needs = self._context.heart, self._backlog.needs()
        if self._version is None:
            heart.waiting("the first weights", unblocked_by="trainer")
        elif needs is None:
            heart.waiting("assignments", unblocked_by="feeder")
        else:
            heart.waiting(f"weights {needs}", unblocked_by="trainer")
        self._bell.wait(_IDLE_S)
        self._bell.clear()

    def _install(self, fresh: Version) -> None:
        """Replace the weights; running samples go on with the new ones and say from which token on."""
        installed = self._engine.install(fresh.file)
        wrong = sorted(
            name for name, digest in fresh.digests.items() if installed.digests.get(name) != digest
        )
        if wrong:
            raise WeightsError(
                f"the engine does not hold version {fresh.version}: {', '.join(wrong[:3])} differ "
                f"({len(wrong)} of {len(fresh.digests)} tensors). It is not used"
            )
        for name, tokens in installed.tokens.items():
            _change_version(self._running[name], tokens, fresh)
        self._version = fresh
        self._drop_what_is_trained(fresh.version)
        at_step(fresh.version)

    def _drop_what_is_trained(self, version: int) -> None:
        """Somebody else made it: it was thought that this generator is dead."""

        def useless(job: Job) -> bool:
            return job.prompt.purpose == TRAIN and job.prompt.window < version

        self._backlog.take_out(useless)
        names = [n for n, run in self._running.items() if run.finished is None and useless(run.job)]
        if names:
            self._engine.abort(names)
            self._generating -= len(names)
            for name in names:
                del self._running[name]

    def _take_assignments(self) -> int:
        found = 0
        for record in self._assignments.take():
            if record.key.decode() != self._context.name:
                continue  # of another instance that reads the same partition
            try:
                assignment = decode(record.value, Assignment)
                prompts = [decode(raw, Prompt) for raw in assignment.prompts]
            except Unreadable as error:
                self._context.dead_letter(record, str(error))
                continue
            if assignment.run != self._context.run or assignment.start != self._start_id:
                continue
            self._give_back(assignment.withdrawn)
            for prompt, indexes in zip(prompts, assignment.indexes, strict=True):
                found += sum(self._take(Job(prompt, index)) for index in indexes)
        return found

    def _take(self, job: Job) -> bool:
        """Take a job in, unless it is here already."""
        name = sample_id(*job.key)
        if name in self._running or job.key in self._backlog:
            return False
        self._backlog.add(job)
        return True

    def _give_back(self, names: list[str]) -> None:
        """What was withdrawn and is not begun; the dispatcher waits to hear of it."""
        back = self._backlog.give_back({sample_key(name) for name in names})
        self._returned += [sample_id(*job.key) for job in back]
        if names:
            self._report_at = 0.0

    def _submit(self) -> int:
        """Fill the free slots."""
        if self._version is None:
            return 0
        count = 0
        while self._generating < self._spec.generator.slots:
            job = self._backlog.take(self._version.version)
            if job is None:
                break
            self._start(job, self._version)
            count += 1
        if count:
            self._context.heart.working("generating")
        return count

    def _start(self, job: Job, version: Version) -> None:
        prompt = job.prompt
        name = sample_id(prompt.group, job.index)
        seed = sampling_seed(
            self._spec.seed, self._spec.run, prompt.problem_id, prompt.group, job.index, 0, version.version
        )
        self._running[name] = _Running(job, seed, time.time(), [0], [version.version], [version.root])
        self._generating += 1
        self._engine.submit(
            Request(name, prompt.tokens.tolist(), self._spec.sampling.max_tokens, seed, prompt.predicted)
        )

    def _step(self) -> int:
        hurry = self._rewards.pending() and self._generating < _FEW
        finished = self._engine.step(_SCORES_S if hurry else _HOLD_S)
        for sample in finished:
            running = self._running.get(sample.id)
            if running is None:
                continue  # it was dropped while it came
            self._generating -= 1
            running.finished, running.finished_at = sample, time.time()
            self._rewards.score(sample.id, running.job.prompt.problem, self._text(sample.tokens))
        return len(finished)

    def _collect(self, scores: list[Score]) -> int:
        """Samples that are scored are whole."""
        for score in scores:
            sample = self._sample(self._running.pop(score.key), score)
            if not self._held:
                self._held_since = time.monotonic()
            self._held.append(sample)
            self._progress.made += 1
            self._progress.tokens += sample.true_length
            if score.error:
                self._progress.failed_rewards += 1
                self._context.log.warning("sample %s has no reward: %s", score.key, score.error)
        return len(scores)

    def _publish(self) -> None:
        """Send what is held, if it is time."""
        if self._generating >= _FEW and time.monotonic() - self._held_since < _HOLD_S:
            return
        for sample in self._held:
            self._context.writer.send(
                self._context.topics.samples, encode(sample), key=sample.id, partition=sample.length_class
            )
        self._held.clear()

    def _sample(self, running: _Running, score: Score) -> Sample:
        prompt, finished = running.job.prompt, running.finished
        assert finished is not None
        return Sample(
            run=prompt.run, purpose=prompt.purpose, group=prompt.group, index=running.job.index, attempt=0,
            size=prompt.size, problem_id=prompt.problem_id, epoch=prompt.epoch, window=prompt.window,
            mini=prompt.mini, bundle=prompt.bundle, bundle_groups=prompt.bundle_groups,
            prompt_tokens=prompt.tokens, tokens=finished.tokens, logprobs=finished.logprobs,
            version_starts=np.array(running.version_starts, dtype=np.int32),
            versions=np.array(running.versions, dtype=np.int32), roots=running.roots, seed=running.seed,
            finish=finished.finish, reward=score.total, reward_parts=score.parts, reward_error=score.error,
            predicted=prompt.predicted, length_class=prompt.length_class, min_version=prompt.min_version,
            generator=self._context.name, admitted_at=prompt.admitted_at, started_at=running.started_at,
            finished_at=running.finished_at, scored_at=time.time(),
        )  # fmt: skip

    def _report(self, *, leaving: bool = False) -> None:
        """Say that it is there, what it has, and how it gets on."""
        if time.monotonic() < self._report_at and not leaving:
            return
        self._report_at = time.monotonic() + REPORT_S
        tokens, pace = self._engine.unfinished(), self._engine.pace()
        held = [(job.key, -1) for job in self._backlog]
        held += [(run.job.key, tokens.get(name, 0)) for name, run in self._running.items()]
        report = InstanceReport(
            run=self._context.run, instance=self._context.name, start=self._start_id,
            slots=self._spec.generator.slots, batches=pace.batches, seconds=pace.seconds,
            version=-1 if self._version is None else self._version.version,
            groups=np.array([key[0] for key, _ in held], np.int64),
            indexes=np.array([key[1] for key, _ in held], np.int16),
            tokens=np.array([count for _, count in held], np.int32),
            returned=self._returned, leaving=leaving, sent_at=time.time(),
        )  # fmt: skip
        self._returned = []
        self._context.writer.send(self._context.topics.instances, encode(report), key=self._context.name)

    def _say_goodbye(self) -> None:
        """What it has goes to others at once; without this, when it has been silent for long enough."""
        with contextlib.suppress(BusError):
            self._report(leaving=True)

    def _count(self) -> None:
        self._context.heart.counters.update(
            made=self._progress.made, tokens=self._progress.tokens, queued=len(self._backlog),
            running=len(self._running), busy_s=self._progress.busy_s,
            failed_rewards=self._progress.failed_rewards,
            version=-1 if self._version is None else self._version.version,
        )  # fmt: skip


def _change_version(running: _Running, tokens: int, fresh: Version) -> None:
    """From token `tokens` on, a sample is made by `fresh`."""
    if running.version_starts[-1] == tokens:  # no token of the version before
        running.versions[-1], running.roots[-1] = fresh.version, fresh.root
    else:
        running.version_starts.append(tokens)
        running.versions.append(fresh.version)
        running.roots.append(fresh.root)


def body(context: Context) -> None:
    """What a generator does."""
    spec = context.spec
    began = time.monotonic()
    bell = threading.Event()
    options = EngineOptions(
        model=context.record.model,
        dtype=spec.model.dtype,
        slots=spec.generator.slots,
        max_model_len=spec.sampling.max_prompt_tokens + spec.sampling.max_tokens,
        temperature=spec.sampling.temperature,
        kv_cache_mib=spec.generator.kv_cache_mib,
        threads=spec.generator.threads,
        batch_invariant=spec.generator.batch_invariant,
    )
    engine = RemoteEngine(options, bell, deadline_s=spec.deadlines.start_s)
    generator = Generator(context, engine, load_to_text(context.record.model), bell)
    engine.wait_until_ready()
    context.loaded()
    context.log.info("engine ready after %.1f s", time.monotonic() - began)
    generator.run()


if __name__ == "__main__":
    sys.exit(run_role("generator", body))

"""The core of a generator: takes jobs, runs an engine on them, gives whole samples.

take ──► backlog ──► fill: a free slot takes the next job that the weights may do ──► step ──► made
update ──► the next weights ──► fill: prepared, installed between two decode steps, verified by hash

It uses no Kafka and no threads, and its clock is a parameter. A sample that was made with weights which are
not verified yet stays here until they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from infra.logs import at_step
from infra.weights.weights_error import WeightsError
from producers.backlog import Backlog
from producers.dispatch.jobs import SampleJob
from producers.engines.engine import DrawnAnswer, Engine, SampleRequest
from producers.installing import VerifiedWeights
from schemas.expert_routes import BadRoutes, pack_routes, unpack_routes
from schemas.identity import SampleKey, sample_id, sample_key, sampling_seed
from schemas.messages import TRAIN, Part
from schemas.runspec import RunSpec

_NO_TOKENS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass
class Begun:
    """A sample that the engine is making: `versions[i]` makes its tokens from `version_starts[i]` on."""

    job: SampleJob
    seed: int
    started_at: float
    version_starts: list[int]
    versions: list[int]
    roots: list[str]
    tokens: np.ndarray = field(default_factory=lambda: _NO_TOKENS)  # made by other generators
    logprobs: np.ndarray = field(default_factory=lambda: _NO_LOGPROBS)
    routes: bytes = b""  # of the prompt and all of `tokens` but the last, as a part has them

    @classmethod
    def of(cls, part: Part, job: SampleJob) -> Begun:
        """Continue a sample where another generator left it."""
        return cls(
            job, part.seed, part.started_at, part.version_starts.tolist(), part.versions.tolist(),
            list(part.roots), part.tokens, part.logprobs, part.routes if part.tokens.size else b"",
        )  # fmt: skip

    def whole(self, drawn: DrawnAnswer) -> DrawnAnswer:
        """Return an answer with the tokens that other generators had made before."""
        if not self.tokens.size:
            return drawn
        return replace(
            drawn, tokens=np.concatenate([self.tokens, drawn.tokens]),
            logprobs=np.concatenate([self.logprobs, drawn.logprobs]), routes=self._whole_routes(drawn),
        )  # fmt: skip

    def _whole_routes(self, drawn: DrawnAnswer) -> np.ndarray | None:
        """Return the routes of all tokens: those by which they were drawn, where that was elsewhere.

        None if what the other generator sent can't be this model's routes.
        """
        tokens = self.job.prompt.tokens.size + self.tokens.size - 1
        if drawn.routes is None or not self.routes:
            return drawn.routes
        try:
            earlier = unpack_routes(self.routes, tokens)
        except BadRoutes:
            return None
        if earlier.shape[1:] != drawn.routes.shape[1:] or earlier.dtype != drawn.routes.dtype:
            return None
        return np.concatenate([earlier, drawn.routes[tokens:]])

    def goes_on_with(self, fresh: VerifiedWeights, tokens: int) -> None:
        """Note that the weights `fresh` make the sample from token `tokens` on."""
        if self.versions[-1] == fresh.version:
            return
        if self.version_starts[-1] == tokens:  # the version before made no token
            self.versions[-1], self.roots[-1] = fresh.version, fresh.root
        else:
            self.version_starts.append(tokens)
            self.versions.append(fresh.version)
            self.roots.append(fresh.root)


def packed_of(drawn: DrawnAnswer) -> bytes:
    """Return an answer's routes as messages have them; empty if there are none."""
    return b"" if drawn.routes is None or not len(drawn.routes) else pack_routes(drawn.routes)


@dataclass(frozen=True)
class Left:
    """An unfinished sample that another generator shall continue."""

    begun: Begun
    tokens: np.ndarray  # all tokens made so far
    logprobs: np.ndarray
    routes: bytes = b""  # as a part has them

    @classmethod
    def of(cls, begun: Begun, drawn: DrawnAnswer) -> Left:
        """Leave a sample after what an engine drew for it last."""
        whole = begun.whole(drawn)
        return cls(begun, whole.tokens, whole.logprobs, packed_of(whole))

    def part(self, run: str, generator: str, now: float) -> Part:
        """Return the record for `<run>.parts`."""
        begun = self.begun
        return Part(
            run=run, group=begun.job.prompt.group, index=begun.job.index, tokens=self.tokens,
            logprobs=self.logprobs, version_starts=np.array(begun.version_starts, dtype=np.int32),
            versions=np.array(begun.versions, dtype=np.int32), roots=begun.roots, seed=begun.seed,
            generator=generator, started_at=begun.started_at, sent_at=now, routes=self.routes,
        )  # fmt: skip


@dataclass(frozen=True)
class MadeSample:
    """A sample with all of its tokens."""

    begun: Begun
    finished: DrawnAnswer
    finished_at: float


class Decoding:
    """Runs one engine: keeps its slots full and its weights up to date."""

    def __init__(self, spec: RunSpec, engine: Engine, now: Callable[[], float] = time.time) -> None:
        self._spec, self._engine, self._now = spec, engine, now
        self._on_update = spec.generator.on_update
        self._version: VerifiedWeights | None = None
        self._verified = True  # whether the engine is known to hold `_version`
        self._next: VerifiedWeights | None = None  # the newest weights, if newer than `_version`
        self._preparing: VerifiedWeights | None = None  # the weights that the engine prepares
        self._claimed: VerifiedWeights | None = None  # the weights that are installed next
        self._running: dict[str, Begun] = {}
        self._unproven: dict[str, MadeSample] = {}  # made with weights that are not verified
        self._backlog = Backlog()
        self._rests = False
        self.installs, self.pause_s = 0, 0.0

    @property
    def version(self) -> int:
        """The version of the weights that the engine decodes with; -1 before the first."""
        return -1 if self._version is None else self._version.version

    @property
    def running(self) -> int:
        """The number of samples that are begun and that `step` has not returned yet."""
        return len(self._running) + len(self._unproven)

    @property
    def is_done(self) -> bool:
        """Whether no sample runs and none can be begun with the present weights."""
        needs = self._backlog.needs()
        return not self.running and (needs is None or needs > self.version)

    def rest(self) -> None:
        """Have the engine draw nothing until `fill` finds work. Running samples stay where they are."""
        if not self._rests:
            self._engine.rest()
            self._rests = True

    @property
    def is_verified(self) -> bool:
        """Whether the engine's weights are verified."""
        return self._verified

    @property
    def queued(self) -> int:
        """The number of jobs that are not begun."""
        return len(self._backlog)

    @property
    def needs(self) -> int | None:
        """The version of the weights that the next job needs; None if there is no job."""
        return self._backlog.needs()

    def held(self) -> list[tuple[SampleKey, int]]:
        """Return all unfinished samples, each with its last known number of tokens; -1 if it is not begun."""
        tokens = self._engine.unfinished()
        begun = [(run.job.key, len(run.tokens) + tokens.get(name, 0)) for name, run in self._running.items()]
        made = [(one.begun.job.key, one.finished.tokens.size) for one in self._unproven.values()]
        return [(job.key, -1) for job in self._backlog] + begun + made

    def take(self, job: SampleJob) -> bool:
        """Take a job in. Return False if it is here already."""
        name = sample_id(*job.key)
        if name in self._running or name in self._unproven or job.key in self._backlog:
            return False
        self._backlog.add(job)
        return True

    def give_back(self, names: Iterable[str]) -> list[str]:
        """Remove those of the named jobs that are not begun. Return their names."""
        back = self._backlog.give_back({sample_key(name) for name in names})
        return [sample_id(*job.key) for job in back]

    @property
    def begun(self) -> list[str]:
        """The ids of the samples that are begun and not finished."""
        return list(self._running)

    def hand_over(self, names: Iterable[str]) -> list[Left]:
        """Remove those of the named samples that are begun and not finished, and return them.

        Another generator continues with their tokens, so the weights must be verified when this is called.
        """
        assert self._verified, "samples may be handed over only when the weights are verified"
        mine = [name for name in names if name in self._running]
        if not mine:
            return []
        return [Left.of(self._running.pop(one.id), one) for one in self._engine.hand_over(mine)]

    def update(self, fresh: VerifiedWeights) -> None:
        """Take newer weights, and drop the samples of iterations that are already trained.

        Such a sample was thought lost, and another generator made it.
        """
        self._next = fresh

        def useless(job: SampleJob) -> bool:
            return job.prompt.purpose == TRAIN and job.prompt.iteration < fresh.version

        self._backlog.take_out(useless)
        names = [name for name, run in self._running.items() if useless(run.job)]
        if names:
            self._engine.abort(names)
            for name in names:
                del self._running[name]

    def fill(self) -> int:
        """Install new weights if that is due, then fill the free slots. Return how many jobs were begun."""
        if self._rests and self.is_done and self._claimed is None and self._next is None:
            return 0
        if self._rests:
            self._engine.go_on()
            self._rests = False
        self._renew()
        if self._version is None or (self._claimed is not None and self._on_update == "wait"):
            return 0
        count = 0
        while len(self._running) < self._spec.generator.slots:
            job = self._backlog.take(self._version.version)
            if job is None:
                break
            self._begin(job, self._version)
            count += 1
        return count

    def step(self, wait_s: float) -> list[MadeSample]:
        """Run one engine step of at most `wait_s` seconds. Return finished samples of verified weights."""
        finished = self._engine.step(wait_s)
        now = self._now()
        for one in finished:
            if one.id in self._running:  # else it was aborted or handed over
                begun = self._running.pop(one.id)
                self._unproven[one.id] = MadeSample(begun, begun.whole(one), now)
        self._verify()
        older = [made for made in self._unproven.values() if made.begun.versions[-1] != self.version]
        made = list(self._unproven.values()) if self._verified else older
        for sample in made:
            del self._unproven[sample.finished.id]
        return made

    def _is_through(self) -> bool:
        """Whether no sample runs and no waiting job may be done by the present weights.

        This happens in the end: once newer weights are there, no job for older ones is admitted any more.
        """
        needs = self._backlog.needs()
        return not self._running and (needs is None or needs > self.version)

    def _renew(self) -> None:
        """Prepare or install the next weights, if it is time. The present ones are verified first."""
        self._verify()
        fresh = self._claimed or self._next
        if fresh is None or not self._verified:
            return
        if self._preparing is not fresh:
            self._preparing = fresh
            self._engine.prepare(fresh.patch)
        if self._claimed is None and (self._on_update != "wait" or self._is_through()):
            self._next = None
            self._claimed = fresh if fresh.claim() else None  # None: newer ones are about to come
        if self._claimed is not None and self._engine.is_ready():
            self._claimed = self._preparing = None
            self._install(fresh)
            self._verify()

    def _install(self, fresh: VerifiedWeights) -> None:
        """Replace the weights. Each running sample notes from which token on the new ones make it."""
        installed = self._engine.install(recompute=self._on_update == "recompute")
        for name, tokens in installed.tokens.items():
            begun = self._running[name]
            begun.goes_on_with(fresh, len(begun.tokens) + tokens)
        self._version, self._verified = fresh, False
        self.installs += 1
        self.pause_s += installed.pause_s
        at_step(fresh.version)

    def _verify(self) -> None:
        """Raise WeightsError if the engine holds other weights than were installed."""
        if self._version is None or self._verified or (found := self._engine.digests()) is None:
            return
        expected = self._version.digests
        if wrong := sorted(name for name, digest in expected.items() if found.get(name) != digest):
            raise WeightsError(
                f"the engine does not hold version {self.version}: {', '.join(wrong[:3])} differ "
                f"({len(wrong)} of {len(expected)} tensors). That version is not used"
            )
        self._verified = True

    def _begin(self, job: SampleJob, version: VerifiedWeights) -> None:
        prompt, spec = job.prompt, self._spec
        name = sample_id(prompt.group, job.index)
        if job.part is None or (self._on_update == "wait" and job.part.versions[-1] != version.version):
            seed = sampling_seed(
                spec.seed, spec.run, prompt.problem_id, prompt.group, job.index, 0, version.version
            )
            begun = Begun(job, seed, self._now(), [0], [version.version], [version.root])
        else:
            begun = Begun.of(job.part, job)
            begun.goes_on_with(version, len(begun.tokens))
        self._running[name] = begun
        self._engine.submit(
            SampleRequest(
                name, prompt.tokens.tolist(), spec.sampling.max_tokens, begun.seed, prompt.predicted,
                begun.tokens.tolist(),
            )
        )  # fmt: skip

"""Reads `<run>.samples` once for the whole feeder: decodes and checks each sample, and passes it on.

    <run>.samples ──► of this run? ──► admitted, and not trained? ──► fit? ──► dispatcher, ranker,
                                             └─ not yet: held ◄────────┘       resampling, evaluations
                                                                 its weights are not known yet

An unfit training sample is reported by the trainer, by the same rules, and made again. Unfit samples of
evaluations are reported by `producers.evaluations`.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from infra.bus import Record, clamp, read_until
from infra.errors import Explained
from infra.gate import Gate, passed_over
from infra.roles.context import RoleContext
from infra.route_shapes import followed_shape
from infra.tail import Inbox
from infra.weights.versions import WeightStore
from schemas.admission import is_of_run, latest_iteration
from schemas.fitness import contradiction, fault, weights_fault
from schemas.identity import round_of
from schemas.messages import EVAL, TRAIN, Prompt, Sample, StepRecord

_Item = TypeVar("_Item")

_POLL_S = 0.5
_MOST_HELD, _MOST_HELD_BYTES = 4096, 64 << 20
_ROOTS = 256  # more than the iterations that samples may be ahead
_ASK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class AdmittedSample:
    """A sample whose group was admitted."""

    sample: Sample
    prompt: Prompt
    record: Record
    fault: str  # why the sample can't be used; empty if it is fit

    @property
    def key(self) -> tuple[int, int]:
        """The sample's group and index."""
        return self.sample.group, self.sample.index


class Subscription(Generic[_Item]):
    """Collects for one reader the items that `pick` makes of samples; `pick` returns None to skip one."""

    def __init__(self, pick: Callable[[AdmittedSample], _Item | None], bell: threading.Event) -> None:
        self._pick, self.bell = pick, bell
        self._came = Inbox[_Item]()

    def offer(self, taken: AdmittedSample) -> bool:
        """Called by the feed for each sample. Return whether the sample was picked."""
        item = self._pick(taken)
        if item is None:
            return False
        self._came.put(item)
        return True

    def fail(self, error: BaseException) -> None:
        """Called by the feed when it fails: the next `take` raises the error."""
        self._came.put(error)
        self.bell.set()

    def take(self) -> list[_Item]:
        """Return the items that came since the last call.

        Never waits; raises the error that ended the feed.
        """
        return self._came.take()


class FeederRoots:
    """Root hashes of this run's versions, from the ledger, or from the store if it is ahead of the ledger."""

    def __init__(self, context: RoleContext, inherited: Mapping[int, str] | None = None) -> None:
        """`inherited`: roots of versions that a fork has from its run, and that are not in its own store."""
        self._weights = WeightStore(context.store, context.run)
        self._most_stale = context.spec.algorithm.most_stale
        self.inherited = dict(inherited or {})
        self._known: dict[int, str] = {}
        self._asked: dict[int, float] = {}

    def learn(self, step: StepRecord) -> None:
        """Take the root from a ledger record, if it ends an iteration."""
        if step.last_of_iteration and step.root_out:
            self._put(step.version_out, step.root_out)

    def _put(self, version: int, root: str) -> None:
        self._known[version] = root
        while len(self._known) > _ROOTS:
            del self._known[next(iter(self._known))]  # the oldest entry

    def trained(self, iterations: int) -> None:
        """Forget inherited roots of versions that no sample of an open iteration can name."""
        self.inherited = {
            version: root
            for version, root in self.inherited.items()
            if version + self._most_stale >= iterations
        }

    def of(self, version: int) -> str | None:
        """Return a version's root, or None if it is not known yet.

        The store is asked at most once a second.
        """
        if (root := self.inherited.get(version)) is not None:
            return root
        now = time.monotonic()
        if version not in self._known and now >= self._asked.get(version, -math.inf):
            if (published := self._published(version)) is not None:
                self._put(version, published)
                self._asked.pop(version, None)
            else:
                self._asked = {one: at for one, at in self._asked.items() if at > now}
                if len(self._asked) < _ROOTS:
                    self._asked[version] = now + _ASK_AGAIN_S
        return self._known.get(version)

    def _published(self, version: int) -> str | None:
        with suppress(Explained):  # a store that can't be reached has no answer now
            if found := self._weights.find(version):
                return found.root
        return None


class SampleFeed:
    """Reads for all who subscribe before `read_back`. `follow` then reads on in a thread."""

    def __init__(
        self, context: RoleContext, start: Mapping[int, int], trained: int, roots: FeederRoots
    ) -> None:
        """`start`: positions to read from.

        `trained`: how many iterations are trained; their samples are not wanted.
        """
        self._context, self._trained, self._roots = context, trained, roots
        self._resample = context.spec.loss.most_draws
        self._vocabulary = _vocabulary(context.record.model)
        self._route_shape = followed_shape(context.record.model, context.spec)
        self._gate = Gate(Sample, context.run, passed_over)  # the trainer reports refused records
        self._start = start
        self._subscriptions: list[Subscription[object]] = []
        self._prompts: dict[int, Prompt] = {}  # by group
        self._fresh = threading.Event()  # set when groups were admitted: held samples may be wanted now
        self._held: deque[tuple[Record, Sample]] = deque()
        self._held_bytes, self._look_at = 0, 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> SampleFeed:
        """Open the topic. Return itself."""
        context = self._context
        self._reader = context.bus.reader(context.topics.samples, self._start, patient=True)
        for partition, count in clamp(self._reader).items():
            context.log.info("%d samples of class %d are gone from the log", count, partition)
        return self

    def subscribe(
        self, pick: Callable[[AdmittedSample], _Item | None], bell: threading.Event | None = None
    ) -> Subscription[_Item]:
        """Call `pick` with each sample, in the feed's thread. Ring `bell` when it returned an item."""
        subscription = Subscription(pick, bell or threading.Event())
        self._subscriptions.append(subscription)  # type: ignore[arg-type]
        return subscription

    def admitted(self, prompts: Iterable[Prompt]) -> None:
        """Pass on samples of these groups from now on, those included that have come already."""
        with self._lock:
            for prompt in prompts:
                if prompt.purpose == EVAL or prompt.iteration >= self._trained:
                    self._prompts.setdefault(prompt.group, prompt)
        self._fresh.set()

    def trained(self, iterations: int) -> None:
        """Drop training samples of the first `iterations` iterations from now on: they are trained."""
        with self._lock:
            self._trained = iterations
            self._prompts = {
                group: prompt
                for group, prompt in self._prompts.items()
                if prompt.purpose == EVAL or prompt.iteration >= iterations
            }

    def evaluated(self, groups: Iterable[int]) -> None:
        """Drop samples of these groups from now on: they are evaluated."""
        with self._lock:
            for group in groups:
                self._prompts.pop(group, None)

    def read_back(self) -> None:
        """Read the log up to its present end."""
        topic, deadline_s = self._context.topics.samples, self._context.spec.deadlines.progress_s
        ends = self._reader.end_offsets()
        for record in read_until(self._reader, ends, topic, deadline_s=deadline_s):
            self._take([record])

    def follow(self) -> None:
        """Read on in a thread, until closed."""
        self._thread = threading.Thread(target=self._follow, daemon=True, name="samples")
        self._thread.start()

    def close(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._closed.set()
        if self._thread is None:
            self._reader.close()

    def _follow(self) -> None:
        try:
            while not self._closed.is_set():
                records = self._reader.poll(_POLL_S)
                if self._fresh.is_set() or (self._held and time.monotonic() >= self._look_at):
                    self._fresh.clear()
                    self._look_again()
                self._take(records)
            self._reader.close()
        except Exception as error:  # any error: the next `take` raises it
            for subscription in self._subscriptions:
                subscription.fail(error)

    def _take(self, records: Iterable[Record]) -> None:
        rung = set()
        for record, sample in self._gate.take(records):
            rung |= self._offer(record, sample)
        for bell in rung:
            bell.set()

    def _look_again(self) -> None:
        held, self._held, self._held_bytes = self._held, deque(), 0
        self._look_at = time.monotonic() + _ASK_AGAIN_S
        for record, sample in held:
            for bell in self._offer(record, sample):
                bell.set()

    def _offer(self, record: Record, sample: Sample) -> set[threading.Event]:
        with self._lock:
            prompt, trained = self._prompts.get(sample.group), self._trained
        if prompt is None:
            if self._may_be_admitted(sample, trained):
                self._hold(record, sample)
            return set()
        if any(self._roots.of(version) is None for version in sample.versions.tolist()):
            self._hold(record, sample)  # until it can be checked that the run's own weights made it
            return set()
        taken = AdmittedSample(sample, prompt, record, self._fault(sample, prompt))
        return {one.bell for one in self._subscriptions if one.offer(taken)}

    def _may_be_admitted(self, sample: Sample, trained: int) -> bool:
        """Whether the group may still be admitted: a feeder that this one replaces may have been ahead."""
        spec = self._context.spec
        if sample.purpose == EVAL:
            return sample.group < 0 and trained < sample.iteration <= spec.algorithm.iterations
        if not is_of_run(sample.group, spec.algorithm) or round_of(sample.group) > self._resample:
            return False
        return trained <= latest_iteration(sample.group, spec.algorithm)

    def _hold(self, record: Record, sample: Sample) -> None:
        self._held.append((record, sample))
        self._held_bytes += len(record.value)
        while len(self._held) > _MOST_HELD or self._held_bytes > _MOST_HELD_BYTES:
            self._held_bytes -= len(self._held.popleft()[0].value)

    def _fault(self, sample: Sample, prompt: Prompt) -> str:
        spec = self._context.spec
        if sample.purpose != prompt.purpose:
            return f"its purpose is {sample.purpose[:64]!r}; {prompt.purpose!r} was admitted"
        if sample.purpose == TRAIN:
            newest = spec.algorithm.iterations  # the trainer knows before the feeder which version exists
            reason = fault(sample, spec, self._vocabulary, self._route_shape) or weights_fault(
                sample, spec, newest, self._roots.of
            )
        else:
            reason = self._fault_of_evaluation(sample, prompt)
        return reason or contradiction(sample, prompt)

    def _fault_of_evaluation(self, sample: Sample, prompt: Prompt) -> str:
        if sample.size != prompt.size or not 0 <= sample.index < prompt.size:
            return f"index {sample.index} of {sample.size} does not fit groups of {prompt.size}"
        if not 0 < sample.tokens.size <= (most := self._context.spec.sampling.max_tokens):
            return f"the answer has {sample.tokens.size} tokens; 1 to {most} are allowed"
        if int(sample.versions[0]) < prompt.min_version:
            return f"weights {int(sample.versions[0])} made it; {prompt.min_version} are evaluated"
        for version, root in zip(sample.versions.tolist(), sample.roots, strict=True):
            if self._roots.of(version) != root:
                return f"it was made by other weights than version {version} of this run"
        return ""


def _vocabulary(model: str) -> float:
    file = Path(model) / "config.json"
    return float(json.loads(file.read_text()).get("vocab_size", math.inf)) if file.is_file() else math.inf

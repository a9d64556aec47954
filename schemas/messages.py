"""What travels over Kafka. Each field says why it is there.

A message is well-formed in itself, or it can't be read: numbers are in the ranges of their fields, and
`wrong` says what else its fields can't be. Whether it fits the run is for its readers to check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar, TypeVar

import numpy as np
from msgspec import Meta

from schemas.identity import ROUND, is_sample_id, sample_id
from schemas.wire import Float32s, Float64s, Int16s, Int32s, Int64s, Message, UInt64s

EVERYONE = "*"  # in place of an instance's name

TRAIN = "train"
EVAL = "eval"

# What a field may hold: nothing that arithmetic or memory could not bear.
WireName = Annotated[str, Meta(min_length=1, max_length=512)]
Line = Annotated[str, Meta(max_length=4096)]  # for people
VersionNumber = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # of weights, and iterations; -1: none
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bytes = Annotated[int, Meta(ge=0, le=2**62)]
GroupNumber = Annotated[int, Meta(ge=-(2**40), le=1025 * ROUND)]
Offset = Annotated[int, Meta(ge=0, le=2**62)]
_ABOVE_ZERO = 1e-3  # a logprob may be so much, by rounding
Slots = Annotated[int, Meta(ge=1, le=2**20)]  # that an instance has: tables have as many rows
_Number = TypeVar("_Number", int, float)
Points = Annotated[list[_Number], Meta(max_length=64)]  # of a curve


def alike(**lengths: int) -> str:
    """Why these fields, which have one entry for each of the same things, do not go together."""
    if len(set(lengths.values())) == 1:
        return ""
    return "these have to be equally many: " + ", ".join(f"{n} {name}" for name, n in lengths.items())


def all_ids(name: str, ids: Iterable[str]) -> str:
    """Which of these is no id of a sample."""
    return next((f"{one[:64]!r} in {name} is no sample's id" for one in ids if not is_sample_id(one)), "")


def finite(**numbers: float) -> str:
    """Which of these is no finite number."""
    return next(
        (f"{name} is {n}, which is no number" for name, n in numbers.items() if not math.isfinite(n)), ""
    )


def are_finite(name: str, numbers: Iterable[float]) -> str:
    """Whether one of many is no finite number."""
    return "" if all(map(math.isfinite, numbers)) else f"{name} has a value that is no number"


class Prompt(Message, frozen=True, kw_only=True):
    """`<run>.prompts`: a group that is admitted to be generated. Partition = predicted length class."""

    KIND: ClassVar[str] = "prompt"
    run: WireName
    purpose: str  # TRAIN or EVAL: evaluation shares the generators but never reaches the trainer
    group: GroupNumber  # number in order of admission: the group's identity; below 0 for EVAL
    size: Count  # how many samples are wanted
    problem_id: Line  # stable over epochs: what history is kept by
    problem: str  # the task's problem as JSON: the reward needs it
    epoch: Count
    tokens: Int32s
    window: Count  # the iteration that trains it (for EVAL: the version that is evaluated)
    mini: Count  # which optimizer step of the iteration
    bundle: (
        GroupNumber  # micro-batches are formed inside a bundle, so that no sum depends on who finished first
    )
    bundle_groups: Count  # how many groups the bundle has: the trainer knows when it is whole
    min_version: Count  # weights older than this would break the staleness bound
    predicted: float  # predicted length in tokens
    predictor: Line  # which ranker, and from how many iterations it had learned
    length_class: Count
    edges: list[float]  # the class edges in force: they drift
    admitted_at: float

    def wrong(self) -> str:
        if self.purpose not in (TRAIN, EVAL):
            return f"its purpose is {self.purpose[:64]!r}"
        if self.size < 1 or self.bundle_groups < 1:
            return "a group and a bundle have at least one member"
        if not 0 <= self.predicted < math.inf:
            return f"{self.predicted} is no predicted length"
        if any(math.isnan(edge) for edge in self.edges):
            return "an edge between its length classes is no number"
        return finite(admitted_at=self.admitted_at)


class Sample(Message, frozen=True, kw_only=True):
    """`<run>.samples`: one finished sample, published at once. Partition = predicted length class."""

    KIND: ClassVar[str] = "sample"
    run: WireName
    purpose: str
    group: GroupNumber
    index: int
    attempt: int
    size: int
    problem_id: Line
    epoch: int
    window: int
    mini: int
    bundle: int
    bundle_groups: int
    prompt_tokens: Int32s
    tokens: Int32s  # with the end-of-text token, if it was drawn
    logprobs: Float32s  # of each token, under the weights that drew it
    version_starts: Int32s  # token index at which each of `versions` took over
    versions: Int32s  # weights versions in order; more than one if weights changed midway
    roots: list[str]  # root hash of each of `versions`
    seed: int
    finish: str  # "stop" or "length"
    reward: float
    reward_parts: dict[str, float]
    reward_error: str  # not empty: no reward could be had, and the sample is not trained
    predicted: float
    length_class: int
    min_version: int
    generator: Line
    admitted_at: float
    started_at: float
    finished_at: float
    scored_at: float

    @property
    def id(self) -> str:
        """The sample's identity in its run."""
        return sample_id(self.group, self.index, self.attempt)

    @property
    def true_length(self) -> int:
        """Length in tokens."""
        return int(self.tokens.size)

    def wrong(self) -> str:
        """`schemas.fitness` says whether it fits the run."""
        return self._wrong_logprobs() or self._wrong_versions() or self._wrong_numbers()

    def _wrong_logprobs(self) -> str:
        if self.logprobs.size != self.tokens.size:
            return f"{self.tokens.size} tokens have {self.logprobs.size} logprobs"
        said = self.logprobs
        if said.size and not (np.minimum.reduce(said) > -math.inf and np.maximum.reduce(said) <= _ABOVE_ZERO):
            return "its logprobs are not logprobs"  # NaN is neither
        return ""

    def _wrong_versions(self) -> str:
        versions, starts = self.versions, self.version_starts
        if versions.size == 0 or not versions.size == starts.size == len(self.roots):
            return "it does not say which weights made it"
        ordered = versions.size == 1 or bool(
            (starts[1:] > starts[:-1]).all() and (versions[1:] > versions[:-1]).all()
        )
        if starts[0] != 0 or starts[-1] > self.tokens.size or versions[0] < 0 or not ordered:
            return "what it says of the weights that made it can't be"
        return ""

    def _wrong_numbers(self) -> str:
        if not self.reward_error and not math.isfinite(self.reward):
            return "its reward is not a number"
        if not 0 <= self.seed < 1 << 64:
            return f"{self.seed} is no seed"
        if not 0 <= self.predicted < math.inf:
            return f"{self.predicted} is no predicted length"
        if not math.isfinite(self.finished_at - self.started_at):
            return "it does not say when it was made"
        return ""


class Assignment(Message, frozen=True, kw_only=True):
    """`<run>.assignments`: what an instance shall make next. Keyed by instance.

    Prompts and parts are named by where they stand: one row a sample to be made.
    """

    KIND: ClassVar[str] = "assignment"
    VERSION: ClassVar[int] = 2
    run: WireName
    instance: WireName  # or EVERYONE
    start: WireName  # of the instance's process that is meant: one that was started since does not take it
    partitions: Int16s  # where the sample's prompt stands on `<run>.prompts` ...
    offsets: Int64s
    groups: Int64s  # ... and which sample it is
    indexes: Int16s
    parts: Int64s  # where it stands on `<run>.parts` what was made of it elsewhere; -1: nothing was
    withdrawn: list[str]  # ids of samples that another instance shall make, if this one has not begun them
    moving: list[str]  # ids of samples that another instance shall go on with
    sent_at: float
    epoch: Count = 0  # of the dispatcher: what an older one says than was heard already does not count
    tell: bool = False  # say all that you have: the dispatcher does not know

    def wrong(self) -> str:
        rows = alike(
            partitions=self.partitions.size, offsets=self.offsets.size, groups=self.groups.size,
            indexes=self.indexes.size, parts=self.parts.size,
        )  # fmt: skip
        return (
            rows
            or all_ids("withdrawn", self.withdrawn)
            or all_ids("moving", self.moving)
            or finite(sent_at=self.sent_at)
        )


class Part(Message, frozen=True, kw_only=True):
    """`<run>.parts`: how far an instance made a sample that another one goes on with. Keyed by sample."""

    KIND: ClassVar[str] = "part"
    run: WireName
    group: GroupNumber
    index: Count
    tokens: Int32s
    logprobs: Float32s
    version_starts: Int32s
    versions: Int32s
    roots: list[str]
    seed: int
    generator: Line
    started_at: float
    sent_at: float

    def wrong(self) -> str:
        versions = self.versions
        if versions.size == 0 or (versions.size > 1 and not (versions[1:] > versions[:-1]).all()):
            return "it does not say which weights made it, in order"
        if versions[0] < 0 or not 0 <= self.seed < 1 << 64:
            return "its weights or its seed can't be"
        return (
            alike(tokens=self.tokens.size, logprobs=self.logprobs.size)
            or alike(versions=versions.size, version_starts=self.version_starts.size, roots=len(self.roots))
            or finite(started_at=self.started_at, sent_at=self.sent_at)
        )


class InstanceReport(Message, frozen=True, kw_only=True):
    """`<run>.instances`: a generator is there, and how far it is. It says no more than has changed."""

    KIND: ClassVar[str] = "report"
    run: WireName
    instance: WireName
    start: WireName  # drawn when the process started: tells it from the one before of the same name
    slots: Slots
    batches: Points[int]  # measured: a decode step of so many samples; empty: as was said before ...
    seconds: Points[float]  # ... takes so long
    version: VersionNumber  # weights that it decodes with; -1: none yet
    groups: Int64s  # if `whole`: of the samples that it has and has not finished
    indexes: Int16s
    tokens: Int32s  # how many tokens each has; -1: not begun
    returned: list[str]  # withdrawn samples that it had not begun
    leaving: bool  # it ends: what it has is to be made by others
    sent_at: float
    whole: bool = True  # else it only says that it is there, and what is new

    def wrong(self) -> str:
        return (
            alike(groups=self.groups.size, indexes=self.indexes.size, tokens=self.tokens.size)
            or alike(batches=len(self.batches), seconds=len(self.seconds))
            or all_ids("returned", self.returned)
            or finite(sent_at=self.sent_at)
        )


class StepRecord(Message, frozen=True, kw_only=True):
    """`<run>.ledger`: one optimizer step, complete enough to run it again. One row a sample, in order."""

    KIND: ClassVar[str] = "step"
    run: WireName
    trainer_epoch: Count  # grows with every start of a trainer: tells a resumed one from the one before
    iteration: Count
    step: Count  # optimizer steps of the run, counted from 0
    last_of_iteration: bool
    version_in: VersionNumber
    version_out: (
        VersionNumber  # the version that the iteration publishes; equal to version_in before its last step
    )
    root_out: str  # root hash of the weights after this step
    recipe: str  # hash of the algorithm settings: a replay with others would not be the same step
    partitions: Int16s
    offsets: Int64s
    groups: Int64s
    indexes: Int16s
    lengths: Int32s
    rewards: Float32s  # NaN where no reward could be had
    versions: Int32s  # oldest weights version in each sample
    seeds: UInt64s
    predicted: Float32s
    problem_ids: list[str]
    microbatches: Int32s  # how many of the rows, in order, each micro-batch has
    losses: Float64s  # of each micro-batch
    metrics: dict[str, float]
    finished_at: float

    def wrong(self) -> str:
        rows = alike(
            partitions=self.partitions.size, offsets=self.offsets.size, groups=self.groups.size,
            indexes=self.indexes.size, lengths=self.lengths.size, rewards=self.rewards.size,
            versions=self.versions.size, seeds=self.seeds.size, predicted=self.predicted.size,
            problem_ids=len(self.problem_ids),
        )  # fmt: skip
        if rows:
            return rows
        if self.microbatches.size and self.microbatches.min() < 0:
            return "a micro-batch has less than no rows"
        if int(self.microbatches.sum(dtype="int64")) != self.groups.size:
            return f"its micro-batches have {int(self.microbatches.sum())} rows; it has {self.groups.size}"
        if self.groups.size and (self.partitions.min() < 0 or self.offsets.min() < 0):
            return "a position of its samples is below 0"
        return finite(finished_at=self.finished_at)


class WeightsAnnouncement(Message, frozen=True, kw_only=True):
    """`<run>.weights`: a version whose manifest is in the store. Compacted: the newest is what counts."""

    KIND: ClassVar[str] = "weights"
    run: WireName
    version: Count
    root: Line
    manifest: Line  # key of the manifest in the object store
    size: Bytes
    trainer_epoch: Count
    announced_at: float
    content: bytes = b""  # the manifest, packed, unless it is large: a far site need not ask for it
    signature: str = ""  # of all of this, by the publisher's key, if it has one (`infra.weights.announcing`)


class SiteReport(Message, frozen=True, kw_only=True):
    """`<run>.weights`: what a site's relay has and does. Keyed by relay, so that the newest is kept."""

    KIND: ClassVar[str] = "site"
    run: WireName
    site: WireName
    relay: Count  # number among the run's relays
    version: VersionNumber  # the newest that is whole and verified in the site's cache; -1: none
    target: VersionNumber  # the one that it fetches now; -1: none
    done: Bytes  # bytes of the target that are here ...
    whole: Bytes  # ... of so many that were not
    lag_s: float  # from the announcement until `version` was here; by two machines' clocks
    crossed: Bytes  # bytes that it has fetched from elsewhere since it started
    rates: dict[str, float]  # bytes a second, by where from
    cache: Line  # where other sites may read what it has; empty: nowhere
    trouble: str  # why nothing comes
    sent_at: float
    passed_over: Annotated[
        tuple[VersionNumber, ...], Meta(max_length=64)
    ] = ()  # announced, and not to be had

    def wrong(self) -> str:
        return are_finite("rates", self.rates.values()) or finite(lag_s=self.lag_s, sent_at=self.sent_at)


class RankerAnnouncement(Message, frozen=True, kw_only=True):
    """`<run>.ranker`: the ranker and the length classes in force from a group on; one for each change."""

    KIND: ClassVar[str] = "ranker"
    run: WireName
    predictor: Line  # as prompts name it
    version: Count  # iterations that it has learned from
    state: Line  # key in the object store
    edges: list[float]
    first_group: GroupNumber
    recall: list[float]  # of the longest 20, 10 and 5 % of the newest iteration; empty if there is none
    error: float  # of the same predictions: root mean square, in log units
    announced_at: float


class Evaluation(Message, frozen=True, kw_only=True):
    """`<run>.evals`: what one weights version earns on held-out problems. One row a sample."""

    KIND: ClassVar[str] = "evaluation"
    run: WireName
    version: Count
    problem_ids: list[str]
    rewards: Float32s
    lengths: Int32s
    predicted: Float32s
    failed: Count  # samples without a reward
    finished_at: float
    newest: VersionNumber = (
        -1
    )  # version that drew a token of it: async, weights may change meanwhile; -1: unknown

    def wrong(self) -> str:
        return alike(
            problem_ids=len(self.problem_ids), rewards=self.rewards.size, lengths=self.lengths.size,
            predicted=self.predicted.size,
        )  # fmt: skip


class DeadLetter(Message, frozen=True, kw_only=True):
    """`<run>.dead`: a record that could not be used, where it came from and why."""

    KIND: ClassVar[str] = "dead"
    run: WireName
    topic: WireName
    partition: Count
    offset: Offset
    reason: str
    raw: bytes
    found_by: str
    found_at: float
    wanted: str = ""  # id of the sample that it should have been, if it is not there and must be made again

    def wrong(self) -> str:
        return all_ids("wanted", [self.wanted] if self.wanted else [])


class Owner(Message, frozen=True, kw_only=True):
    """`<run>.owner`: the run that the topics were made for. Another store may have a run of the same id."""

    KIND: ClassVar[str] = "owner"
    run: WireName
    identity: WireName  # as its record says
    store: Line
    made_at: float


class Heartbeat(Message, frozen=True, kw_only=True):
    """`<run>.status`: what a process does and what it waits for. Compacted by process; people watch it."""

    KIND: ClassVar[str] = "heartbeat"
    run: WireName
    role: WireName
    instance: Count
    pid: Count
    host: str
    state: str
    waits_for: str  # empty while it works
    unblocked_by: str
    since: float
    counters: dict[str, float]
    sent_at: float

    def wrong(self) -> str:
        return are_finite("counters", self.counters.values()) or finite(
            since=self.since, sent_at=self.sent_at
        )


class Pulse(Message, frozen=True, kw_only=True):
    """`<run>.pulse`: the feeder is alive, and says when anything last moved. Every two seconds."""

    KIND: ClassVar[str] = "pulse"
    run: WireName
    still_s: float  # since anything moved, as far as the feeder has heard
    moved: Line  # the last thing that moved, for people
    waits: Line  # each process with what it waits for, for people
    sent_at: float

    def wrong(self) -> str:
        if not self.still_s >= 0:
            return f"{self.still_s} s is no time"
        return finite(still_s=self.still_s, sent_at=self.sent_at)

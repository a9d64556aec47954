"""The messages on Kafka topics. Comments say what the fields are for.

A message that can be read is well-formed: numbers are in the ranges of their fields, and `wrong` has found no
contradiction between fields. Readers check whether the message fits the run. Times are in seconds since 1970.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from msgspec import Meta, field

from schemas.expert_routes import BadRoutes, routed_tokens
from schemas.identity import ROUND, is_sample_id, sample_id
from schemas.wire import (
    Float32s,
    Float64s,
    Int16Differences,
    Int16s,
    Int32Differences,
    Int32s,
    Int64Differences,
    Int64s,
    Message,
    UInt64s,
)

EVERYONE = "*"  # in place of a generator's name

# The last state of a process: it is done or was told to stop, or an error ended it.
ENDED, FAILED = "ended", "failed"

WAIT = "wait: "  # begins the cause of time in which a process waits
MOST_CAUSES = 32  # that a heartbeat may name

TRAIN = "train"
EVAL = "eval"

# Types of fields. Their bounds keep out values that arithmetic or memory could not bear.
WireName = Annotated[str, Meta(min_length=1, max_length=512)]
Line = Annotated[str, Meta(max_length=4096)]  # short text, of any form
VersionNumber = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # a version or an iteration; -1: none
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bytes = Annotated[int, Meta(ge=0, le=2**62)]
GroupNumber = Annotated[int, Meta(ge=-(2**40), le=1025 * ROUND)]
Offset = Annotated[int, Meta(ge=0, le=2**62)]
_ABOVE_ZERO = 1e-3  # rounding may lift a logprob to this
_LOWEST_FLOAT = int(np.float32(np.finfo(np.float32).min).view(np.int32))  # its bits as a whole number
Slots = Annotated[int, Meta(ge=1, le=2**20)]  # slots of a generator; tables have a row for each
_Number = TypeVar("_Number", int, float)
Points = Annotated[list[_Number], Meta(max_length=64)]  # points of a curve


def _empty(dtype: str) -> Any:
    """Return the default of an array that older records lack."""
    return field(default_factory=lambda: np.zeros(0, dtype))


def alike(**lengths: int) -> str:
    """Return why fields with these numbers of entries do not go together; empty if the numbers are equal."""
    if len(set(lengths.values())) == 1:
        return ""
    return "these fields must have equally many entries: " + ", ".join(
        f"{n} {name}" for name, n in lengths.items()
    )


def all_ids(name: str, ids: Iterable[str]) -> str:
    """Return which of these is no id of a sample; empty if all are."""
    return next((f"{one[:64]!r} in {name} is no sample's id" for one in ids if not is_sample_id(one)), "")


def finite(**numbers: float) -> str:
    """Return which of these is no finite number; empty if all are."""
    return next(
        (
            f"{name} is {n}, which is not a finite number"
            for name, n in numbers.items()
            if not math.isfinite(n)
        ),
        "",
    )


def are_finite(name: str, numbers: Iterable[float]) -> str:
    """Return that one of many numbers is not finite; empty if all are."""
    return "" if all(map(math.isfinite, numbers)) else f"{name} has a value that is not a finite number"


def _wrong_count(routes: bytes, tokens: int | None = None) -> str:
    """Return why routes, if there are any, can't be of so many tokens. Nothing is unpacked for that."""
    if not routes:
        return ""
    try:
        found = routed_tokens(routes)
    except BadRoutes as error:
        return str(error)
    return "" if tokens in (None, found) else f"its routes are of {found} tokens; {tokens} are expected"


class OfGroup(Message, frozen=True, kw_only=True):
    """Fields that a prompt and its samples share: which group they are of, and where it belongs."""

    ON_WIRE: ClassVar[Mapping[str, str]] = {"iteration": "window"}
    run: WireName
    purpose: str  # TRAIN or EVAL: evaluation shares the generators but never reaches the trainer
    group: GroupNumber  # number in order of admission: the group's identity; below 0 for EVAL
    size: Count  # how many samples are wanted
    problem_id: Line  # the same in every epoch; the ranker keeps past lengths by it
    epoch: Count  # pass over the problems
    iteration: Count  # that trains the group; in order arrival, at the latest (for EVAL: the version)
    mini: Count  # which optimizer step of the iteration, from 0 on
    bundle: GroupNumber  # micro-batches are formed inside a bundle: no sum depends on which sample came first
    bundle_groups: Count  # how many groups the bundle has, so that the trainer knows when it is whole
    min_version: Count  # the oldest weights that the staleness bound allows
    predicted: float  # predicted length in tokens
    length_class: Count
    admitted_at: float


def shared_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the fields that each sample of a prompt has from it."""
    return {name: getattr(prompt, name) for name in OfGroup.__struct_fields__}


class Prompt(OfGroup, frozen=True, kw_only=True):
    """`<run>.prompts`: a group that is admitted to be generated. Partition = predicted length class."""

    KIND: ClassVar[str] = "prompt"
    problem: str  # the task's problem as JSON: the reward needs it
    tokens: Int32s
    predictor: Line  # name of the ranker, with the number of iterations from which it had learned
    edges: list[float]  # between the length classes when the group was admitted: they change over time

    def wrong(self) -> str:
        if self.purpose not in (TRAIN, EVAL):
            return f"its purpose is {self.purpose[:64]!r}; {TRAIN} or {EVAL} is expected"
        if self.size < 1 or self.bundle_groups < 1:
            return "its group size or its bundle_groups is below 1"
        if not 0 <= self.predicted < math.inf:
            return f"{self.predicted} is no predicted length"
        if any(math.isnan(edge) for edge in self.edges):
            return "an edge between its length classes is no number"
        return finite(admitted_at=self.admitted_at)


class Sample(OfGroup, frozen=True, kw_only=True):
    """`<run>.samples`: one finished sample, published at once. Partition = predicted length class."""

    KIND: ClassVar[str] = "sample"
    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"routes"})
    index: int
    attempt: int
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
    reward_error: str  # why there is no reward; the sample is then not trained. Empty: there is one
    generator: Line
    started_at: float
    finished_at: float
    scored_at: float
    routes: bytes = b""  # the experts that made it, see `schemas.expert_routes`; empty: not recorded

    @property
    def id(self) -> str:
        """The sample's id in its run."""
        return sample_id(self.group, self.index, self.attempt)

    @property
    def true_length(self) -> int:
        """Length in tokens."""
        return int(self.tokens.size)

    def wrong(self) -> str:
        """Return a contradiction between fields. `schemas.fitness` checks whether the sample fits the run."""
        return (
            self._wrong_logprobs() or self._wrong_versions() or self._wrong_numbers() or self._wrong_routes()
        )

    def _wrong_routes(self) -> str:
        return _wrong_count(self.routes, self.prompt_tokens.size + self.tokens.size - 1)

    def _wrong_logprobs(self) -> str:
        if self.logprobs.size != self.tokens.size:
            return f"{self.tokens.size} tokens have {self.logprobs.size} logprobs"
        said = self.logprobs
        # as whole numbers, floats below 0 are in order of size: so all are finite and below 0
        if said.size and np.maximum.reduce(said.view(np.int32)) <= _LOWEST_FLOAT:
            return ""
        if said.size and not (np.minimum.reduce(said) > -math.inf and np.maximum.reduce(said) <= _ABOVE_ZERO):
            return "one of its logprobs is above 0 or not finite"  # NaN fails both comparisons
        return ""

    def _wrong_versions(self) -> str:
        versions, starts = self.versions, self.version_starts
        if versions.size == 0 or not versions.size == starts.size == len(self.roots):
            return "it does not say which weights made it"
        ordered = versions.size == 1 or bool(
            (starts[1:] > starts[:-1]).all() and (versions[1:] > versions[:-1]).all()
        )
        if starts[0] != 0 or starts[-1] > self.tokens.size or versions[0] < 0 or not ordered:
            return "its versions of the weights, or the tokens where they start, are out of order or range"
        return ""

    def _wrong_numbers(self) -> str:
        if not self.reward_error and not math.isfinite(self.reward):
            return "its reward is not a finite number"
        if not 0 <= self.seed < 1 << 64:
            return f"{self.seed} is no seed"
        if not 0 <= self.predicted < math.inf:
            return f"{self.predicted} is no predicted length"
        if not math.isfinite(self.finished_at - self.started_at):
            return "it does not say when it was made"
        return ""


class Assignment(Message, frozen=True, kw_only=True):
    """`<run>.assignments`: the samples that a generator shall make next. Keyed by generator.

    The arrays have one row for each sample. Prompts and parts are named by their offsets.
    """

    KIND: ClassVar[str] = "assignment"
    VERSION: ClassVar[int] = 2
    ON_WIRE: ClassVar[Mapping[str, str]] = {"generator": "instance"}
    run: WireName
    generator: WireName  # name of the generator, or EVERYONE
    start: WireName  # of the generator's process that is meant; one that was started since ignores this
    partitions: Int16s  # of the sample's prompt on `<run>.prompts`
    offsets: Int64s  # of the prompt in that partition
    groups: Int64s  # the sample's group
    indexes: Int16s  # the sample's index in its group
    parts: Int64s  # offset on `<run>.parts` of the tokens that another generator made; -1: none
    withdrawn: list[str]  # ids of samples to give back if they are not begun: another generator makes them
    moving: list[str]  # ids of samples to hand over with their tokens: another generator goes on
    sent_at: float
    epoch: Count = 0  # start of the dispatcher; messages of an older start than was heard are ignored
    tell: bool = False  # the dispatcher asks for a whole report: it does not know the generator's samples

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
    """`<run>.parts`: tokens of an unfinished sample, for another generator to go on with. Keyed by sample."""

    KIND: ClassVar[str] = "part"
    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"routes"})
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
    routes: bytes = b""  # of the prompt's tokens, too, and of all but the last token

    def wrong(self) -> str:
        versions = self.versions
        if versions.size == 0 or (versions.size > 1 and not (versions[1:] > versions[:-1]).all()):
            return "it does not say which weights made it, in order"
        if versions[0] < 0 or not 0 <= self.seed < 1 << 64:
            return "its version of the weights or its seed is out of range"
        return (
            alike(tokens=self.tokens.size, logprobs=self.logprobs.size)
            or alike(versions=versions.size, version_starts=self.version_starts.size, roots=len(self.roots))
            or finite(started_at=self.started_at, sent_at=self.sent_at)
            or _wrong_count(self.routes)
        )


class GeneratorReport(Message, frozen=True, kw_only=True):
    """`<run>.instances`: a generator is alive, and how far its samples are. Most hold only changes."""

    KIND: ClassVar[str] = "report"
    ON_WIRE: ClassVar[Mapping[str, str]] = {"generator": "instance"}
    run: WireName
    generator: WireName
    start: WireName  # drawn when the process started: another than that of an earlier process of the name
    slots: Slots
    batches: Points[int]  # numbers of samples in a decode step; empty: the curve has not changed
    seconds: Points[float]  # measured time of a step with each of those numbers
    version: VersionNumber  # of the weights that it decodes with; -1: none yet
    groups: Int64s  # if `whole`: the group of each unfinished sample that it has; else empty
    indexes: Int16s  # index of each of those samples
    tokens: Int32s  # how many tokens each of them has; -1: not begun
    returned: list[str]  # ids of withdrawn samples that it had not begun
    leaving: bool  # it ends: others shall make its samples
    sent_at: float
    whole: bool = True  # whether it names all its samples; else only what is new
    keeps_bits: bool = False  # whether a sample that it continues for another generator has the same bits
    handed: Count = 0  # if `leaving`: how many of its samples it has handed over as parts
    # mean age of the newest assignments, by its clock, when their samples could begin; 0: it had none
    jobs_late_s: float = 0.0

    def wrong(self) -> str:
        return (
            alike(groups=self.groups.size, indexes=self.indexes.size, tokens=self.tokens.size)
            or alike(batches=len(self.batches), seconds=len(self.seconds))
            or all_ids("returned", self.returned)
            or finite(sent_at=self.sent_at, jobs_late_s=self.jobs_late_s)
        )


class StepRecord(Message, frozen=True, kw_only=True):
    """`<run>.ledger`: one optimizer step, with all that a replay needs. One row a sample, in order."""

    KIND: ClassVar[str] = "step"
    VERSION: ClassVar[int] = 2  # 1 had the seeds, and was not packed
    DICTIONARY: ClassVar[str] = "1ae50747"
    run: WireName
    trainer_epoch: Count  # number of the trainer's start: each new start has a higher one
    iteration: Count
    step: Count  # number of the step in the run, counted from 0
    last_of_iteration: bool
    version_in: VersionNumber  # the version that the iteration begins with
    version_out: (
        VersionNumber  # the version that the iteration publishes; equal to version_in before its last step
    )
    root_out: str  # root hash of the weights after this step
    recipe: str  # hash of the algorithm settings: a replay with others would not be the same step
    partitions: Int16Differences  # of each sample on `<run>.samples`
    offsets: Int64Differences  # of the sample in that partition
    groups: Int64Differences
    indexes: Int16Differences
    lengths: Int32Differences
    rewards: Float32s  # NaN where no reward could be had
    versions: Int32Differences  # oldest weights version in each sample
    seeds: UInt64s = _empty("uint64")  # of schema 1; later ones have `seeds_digest`, and samples their seeds
    predicted: Float32s
    problem_ids: list[str]
    microbatches: Int32s  # how many rows each micro-batch has: the rows are in the order of the micro-batches
    losses: Float64s  # of each micro-batch
    metrics: dict[str, float]
    finished_at: float
    failed_reason: Line = ""  # the most frequent reason why samples have no reward; empty: all have one
    failed_sample: Line = ""  # the id of a sample that has none for that reason
    replayed: Count = 0  # the first so many rows are of groups that an earlier step trained (loss.replay)
    stages: UInt64s = _empty("uint64")  # a digest of each of `schemas.stages`; 0: not recorded
    tolerances: Float64s = _empty("float64")  # by stage: how far another kind of machine may be apart
    made_on: Line = ""  # the kind of machine, and the libraries that bits depend on
    advantages: Float32s = _empty("float32")  # this and the next three: means of each row's tokens, ...
    scores: Float32s = _empty("float32")  # ... NaN where the row was not trained; empty: not recorded
    logprobs: Float32s = _empty("float32")  # under the trained weights
    gaps: Float32s = _empty("float32")  # largest difference to the logprob that the token was drawn with
    sizes: Float64s = _empty("float64")  # lengths of gradient, moments and weights, as vectors
    sketches: Float32s = _empty("float32")  # of these vectors, end to end, see `consumers.learners`
    seeds_digest: Line = ""  # of the samples' seeds in order of size (`schemas.identity.digest_of_seeds`)

    def wrong(self) -> str:
        rows = alike(
            partitions=self.partitions.size, offsets=self.offsets.size, groups=self.groups.size,
            indexes=self.indexes.size, lengths=self.lengths.size, rewards=self.rewards.size,
            versions=self.versions.size, predicted=self.predicted.size,
            problem_ids=len(self.problem_ids),
        )  # fmt: skip
        if rows:
            return rows
        if self.microbatches.size and self.microbatches.min() < 0:
            return "one of its micro-batches has fewer than 0 rows"
        if int(self.microbatches.sum(dtype="int64")) != self.groups.size:
            return (
                f"its micro-batches have {int(self.microbatches.sum())} samples; it names {self.groups.size}"
            )
        if reason := self._wrong_stages():
            return reason
        if self.replayed > self.groups.size:
            return f"{self.replayed} of its samples are replayed; it names {self.groups.size}"
        if self.groups.size and (self.partitions.min() < 0 or self.offsets.min() < 0):
            return "a position of its samples is below 0"
        return finite(finished_at=self.finished_at)

    def _wrong_stages(self) -> str:
        for name in ("seeds", "advantages", "scores", "logprobs", "gaps"):
            if getattr(self, name).size not in (0, self.groups.size):
                return f"its {name} are of {getattr(self, name).size} samples; it names {self.groups.size}"
        if self.sizes.size and self.sketches.size % self.sizes.size:
            return f"{self.sketches.size} numbers are no sketches of {self.sizes.size} vectors"
        if self.tolerances.size and not (self.tolerances >= 0).all():
            return "one of its tolerances is below 0, or no number"
        return ""


class WeightsAnnouncement(Message, frozen=True, kw_only=True):
    """`<run>.weights`: a published version, whose manifest is in the store. Compacted: the newest counts."""

    KIND: ClassVar[str] = "weights"
    run: WireName
    version: Count
    root: Line
    manifest: Line  # key of the manifest in the object store
    size: Bytes
    trainer_epoch: Count
    announced_at: float
    content: bytes = b""  # the packed manifest, so that a far site need not fetch it; empty if it is large
    signature: str = ""  # of the other fields, by the publisher's key, if any (`infra.weights.announcing`)


class SiteReport(Message, frozen=True, kw_only=True):
    """`<run>.weights`: versions that a site's relay has and fetches. Keyed by relay: the newest counts."""

    KIND: ClassVar[str] = "site"
    run: WireName
    site: WireName
    relay: Count  # number among the run's relays
    version: VersionNumber  # the newest version that is whole and verified in the site's cache; -1: none
    target: VersionNumber  # the version that it fetches now; -1: none
    done: Bytes  # bytes of the target that it has fetched so far ...
    whole: Bytes  # ... out of so many that it had to fetch
    lag_s: float  # seconds from the announcement until `version` was here, by two machines' clocks
    crossed: Bytes  # bytes that it has fetched from other places since it started
    rates: dict[str, float]  # bytes a second from each source
    cache: Line  # URL at which other sites may read its chunks; empty: none
    trouble: str  # why it can't fetch or keep weights; empty: it can
    sent_at: float
    passed_over: Annotated[
        tuple[VersionNumber, ...], Meta(max_length=64)
    ] = ()  # versions that were announced and can't be had

    def wrong(self) -> str:
        return are_finite("rates", self.rates.values()) or finite(lag_s=self.lag_s, sent_at=self.sent_at)


class RankerAnnouncement(Message, frozen=True, kw_only=True):
    """`<run>.ranker`: the ranker and the length classes in force from a group on; one for each change."""

    KIND: ClassVar[str] = "ranker"
    run: WireName
    predictor: Line  # name of the ranker, as in prompts
    version: Count  # number of iterations that it has learned from
    state: Line  # key in the object store
    edges: list[float]  # between the length classes
    first_group: GroupNumber  # the first group for which ranker and classes are in force
    recall: list[float]  # shares found of the longest 20, 10 and 5 % of the newest iteration; empty: none yet
    error: float  # of the same predictions: root mean square, in log units
    announced_at: float


class Evaluation(Message, frozen=True, kw_only=True):
    """`<run>.evals`: rewards of one version of the weights on held-out problems. One row a sample."""

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
    )  # the newest version that drew a token: in async mode weights may change meanwhile; -1: unknown

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
    wanted: str = ""  # id of the sample that must be made again since this record was unfit; empty: none

    def wrong(self) -> str:
        return all_ids("wanted", [self.wanted] if self.wanted else [])


class Owner(Message, frozen=True, kw_only=True):
    """`<run>.owner`: the run that the topics were made for. Another store may have a run of the same id."""

    KIND: ClassVar[str] = "owner"
    run: WireName
    identity: WireName  # as the run's record says
    store: Line
    made_at: float


class Heartbeat(Message, frozen=True, kw_only=True):
    """`<run>.status`: the state of a process, and what it waits for. Compacted: the newest of each counts."""

    KIND: ClassVar[str] = "heartbeat"
    ON_WIRE: ClassVar[Mapping[str, str]] = {"number": "instance"}
    run: WireName
    role: WireName
    number: Count  # of this process among its role's
    pid: Count
    host: str
    state: str  # the last one: `ended`, or `failed` if an error ended the process
    waits_for: str  # empty while it works
    unblocked_by: str  # who or what ends the waiting
    since: float  # when the state or the waiting began
    counters: dict[str, float]
    sent_at: float
    trouble: Line = ""  # why one of its newest samples has no reward; empty: all have one
    causes: dict[str, float] = field(default_factory=dict)  # seconds since the process began, by cause

    @property
    def is_last(self) -> bool:
        """Whether the process ends after this heartbeat."""
        return self.state in (ENDED, FAILED)

    def wrong(self) -> str:
        if len(self.causes) > MOST_CAUSES:
            return f"it names {len(self.causes)} causes; at most {MOST_CAUSES} are expected"
        return (
            are_finite("counters", self.counters.values())
            or are_finite("causes", self.causes.values())
            or finite(since=self.since, sent_at=self.sent_at)
        )


class Pulse(Message, frozen=True, kw_only=True):
    """`<run>.pulse`: the feeder says every two seconds that it is alive, and when anything last moved."""

    KIND: ClassVar[str] = "pulse"
    run: WireName
    still_s: float  # seconds since anything moved, as far as the feeder has heard
    moved: Line  # the last thing that moved, for people
    waits: Line  # each process with what it waits for, for people
    sent_at: float

    def wrong(self) -> str:
        if not self.still_s >= 0:
            return f"still_s is {self.still_s}; seconds from 0 on are expected"
        return finite(still_s=self.still_s, sent_at=self.sent_at)


class BalanceRecord(Message, frozen=True, kw_only=True):
    """`<run>.balance`: a change of the number of generators, and why. One record for each."""

    KIND: ClassVar[str] = "balance"
    run: WireName
    iteration: Count  # the newest one that was looked at
    gen_s: float  # seconds that the generators take for an iteration, ...
    train_s: float  # ... and the trainer, each if it never waits for the other
    gain_s: float  # that one generator more would save
    before: Count  # generators
    after: Count
    dry: bool  # it was only recommended
    reason: Line
    decided_by: Line
    decided_at: float

    @property
    def delta_s(self) -> float:
        """How much longer generating takes than training."""
        return self.gen_s - self.train_s

    def wrong(self) -> str:
        return finite(gen_s=self.gen_s, train_s=self.train_s, gain_s=self.gain_s, decided_at=self.decided_at)

"""What travels over Kafka. Each field says why it is there."""

from __future__ import annotations

from typing import ClassVar

from schemas.identity import sample_id
from schemas.wire import Float32s, Float64s, Int16s, Int32s, Int64s, Message, UInt64s

TRAIN = "train"
EVAL = "eval"


class Prompt(Message, frozen=True, kw_only=True):
    """`<run>.prompts`: a group that is admitted to be generated. Partition = predicted length class."""

    KIND: ClassVar[str] = "prompt"
    run: str
    purpose: str  # TRAIN or EVAL: evaluation shares the generators but never reaches the trainer
    group: int  # number in order of admission: the group's identity; below 0 for EVAL
    size: int  # how many samples are wanted
    problem_id: str  # stable over epochs: what history is kept by
    problem: str  # the task's problem as JSON: the reward needs it
    epoch: int
    tokens: Int32s
    window: int  # the iteration that trains it (for EVAL: the version that is evaluated)
    mini: int  # which optimizer step of the iteration
    bundle: int  # micro-batches are formed inside a bundle, so that no sum depends on who finished first
    bundle_groups: int  # how many groups the bundle has: the trainer knows when it is whole
    min_version: int  # weights older than this would break the staleness bound
    predicted: float  # predicted length in tokens
    predictor: str  # which ranker, and from how many iterations it had learned
    length_class: int
    edges: list[float]  # the class edges in force: they drift
    admitted_at: float


class Sample(Message, frozen=True, kw_only=True):
    """`<run>.samples`: one finished sample, published at once. Partition = predicted length class."""

    KIND: ClassVar[str] = "sample"
    run: str
    purpose: str
    group: int
    index: int
    attempt: int
    size: int
    problem_id: str
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
    generator: str
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


class Assignment(Message, frozen=True, kw_only=True):
    """`<run>.assignments`: what an instance shall make next. Keyed by instance."""

    KIND: ClassVar[str] = "assignment"
    run: str
    instance: str
    start: str  # of the instance's process that is meant: one that was started since does not take it
    prompts: list[bytes]  # as they stand on `<run>.prompts`
    indexes: list[list[int]]  # of each prompt: which samples
    withdrawn: list[str]  # ids of samples that another instance shall make, if this one has not begun them
    moving: list[str]  # ids of samples that another instance shall go on with
    parts: list[bytes]  # of samples among `prompts`: what was made of them elsewhere
    sent_at: float


class Part(Message, frozen=True, kw_only=True):
    """`<run>.parts`: how far an instance made a sample that another one goes on with. Keyed by sample."""

    KIND: ClassVar[str] = "part"
    run: str
    group: int
    index: int
    tokens: Int32s
    logprobs: Float32s
    version_starts: Int32s
    versions: Int32s
    roots: list[str]
    seed: int
    generator: str
    started_at: float
    sent_at: float


class InstanceReport(Message, frozen=True, kw_only=True):
    """`<run>.instances`: a generator is there, and how far it is. Twice a second."""

    KIND: ClassVar[str] = "report"
    run: str
    instance: str
    start: str  # drawn when the process started: tells it from the one before of the same name
    slots: int
    batches: list[int]  # measured: a decode step of so many samples ...
    seconds: list[float]  # ... takes so long
    version: int  # weights that it decodes with; -1: none yet
    groups: Int64s  # of the samples that it has and has not finished
    indexes: Int16s
    tokens: Int32s  # how many tokens each has; -1: not begun
    returned: list[str]  # withdrawn samples that it had not begun
    leaving: bool  # it ends: what it has is to be made by others
    sent_at: float


class StepRecord(Message, frozen=True, kw_only=True):
    """`<run>.ledger`: one optimizer step, complete enough to run it again. One row a sample, in order."""

    KIND: ClassVar[str] = "step"
    run: str
    trainer_epoch: int  # grows with every start of a trainer: tells a resumed one from the one before
    iteration: int
    step: int  # optimizer steps of the run, counted from 0
    last_of_iteration: bool
    version_in: int
    version_out: int  # the version that the iteration publishes; equal to version_in before its last step
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


class WeightsAnnouncement(Message, frozen=True, kw_only=True):
    """`<run>.weights`: a version whose manifest is in the store. Compacted: the newest is what counts."""

    KIND: ClassVar[str] = "weights"
    run: str
    version: int
    root: str
    manifest: str  # key of the manifest in the object store
    size: int
    trainer_epoch: int
    announced_at: float
    content: bytes = b""  # the manifest, packed, unless it is large: a far site need not ask for it


class SiteReport(Message, frozen=True, kw_only=True):
    """`<run>.weights`: what a site's relay has and does. Keyed by relay, so that the newest is kept."""

    KIND: ClassVar[str] = "site"
    run: str
    site: str
    relay: int  # number among the run's relays
    version: int  # the newest that is whole and verified in the site's cache; -1: none
    target: int  # the one that it fetches now; -1: none
    done: int  # bytes of the target that are here ...
    whole: int  # ... of so many that were not
    lag_s: float  # from the announcement until `version` was here; by two machines' clocks
    crossed: int  # bytes that it has fetched from elsewhere since it started
    rates: dict[str, float]  # bytes a second, by where from
    cache: str  # where other sites may read what it has; empty: nowhere
    trouble: str  # why nothing comes
    sent_at: float


class RankerAnnouncement(Message, frozen=True, kw_only=True):
    """`<run>.ranker`: the ranker and the length classes in force from a group on; one for each change."""

    KIND: ClassVar[str] = "ranker"
    run: str
    predictor: str  # as prompts name it
    version: int  # iterations that it has learned from
    state: str  # key in the object store
    edges: list[float]
    first_group: int
    recall: list[float]  # of the longest 20, 10 and 5 % of the newest iteration; empty if there is none
    error: float  # of the same predictions: root mean square, in log units
    announced_at: float


class Evaluation(Message, frozen=True, kw_only=True):
    """`<run>.evals`: what one weights version earns on held-out problems. One row a sample."""

    KIND: ClassVar[str] = "evaluation"
    run: str
    version: int
    problem_ids: list[str]
    rewards: Float32s
    lengths: Int32s
    predicted: Float32s
    failed: int  # samples without a reward
    finished_at: float
    newest: int = -1  # version that drew a token of it: async, weights may change meanwhile; -1: unknown


class DeadLetter(Message, frozen=True, kw_only=True):
    """`<run>.dead`: a record that could not be used, where it came from and why."""

    KIND: ClassVar[str] = "dead"
    run: str
    topic: str
    partition: int
    offset: int
    reason: str
    raw: bytes
    found_by: str
    found_at: float
    wanted: str = ""  # id of the sample that it should have been, if it is not there and must be made again


class Heartbeat(Message, frozen=True, kw_only=True):
    """`<run>.status`: what a process does and what it waits for. Compacted by process; people watch it."""

    KIND: ClassVar[str] = "heartbeat"
    run: str
    role: str
    instance: int
    pid: int
    host: str
    state: str
    waits_for: str  # empty while it works
    unblocked_by: str
    since: float
    counters: dict[str, float]
    sent_at: float

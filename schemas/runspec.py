"""The run file: one YAML file is all of a run. Validated here; read by `schemas.loading`."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from schemas.addresses import FilePath, Servers, StoreUrl, Word
from schemas.identity import ROUND
from schemas.losses import LossSection
from schemas.section import Section
from schemas.shortening import shown

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,48}")
_MOST_TOKENS = 10_000_000  # of one sample
_LEAST_TEMPERATURE = 0.01
_MONTH_S = 30 * 86_400


def _plain(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("a name has small letters, digits and dashes, at most 49")
    return name


PlainName = Annotated[str, AfterValidator(_plain)]


class TaskSection(Section):
    """What is to be learned: problems and a reward. Exactly one of `python`, `jsonl` and `dataset`."""

    python: FilePath | None = Field(
        None, description="A .py file (relative to the run file) or module with problems() and reward()."
    )
    jsonl: FilePath | None = Field(None, description="A JSONL file, one problem a line; needs `reward`.")
    dataset: FilePath | None = Field(
        None, description="A Hugging Face dataset: a saved folder or a name; needs `reward`."
    )
    reward: FilePath | None = Field(
        None, description="FILE.py:function or module:function; by default `reward` of the python task."
    )
    held_out_jsonl: FilePath | None = Field(
        None, description="JSONL file of held-out problems, for evaluation."
    )
    prompt_field: Word = Field("prompt", description="Field of a problem that holds the prompt's text.")
    id_field: Word = Field(
        "id",
        description="Field that names a problem, by text or a number. Where it is absent a hash of the "
        "prompt does; problems of the same prompt are then told apart by a number.",
    )
    train_split: Word = Field("train", description="Name of the split whose problems are trained.")
    held_out_split: Word = Field("held_out", description="Name of the split that evaluations are made of.")
    limit: int = Field(
        100_000,
        gt=0,
        le=100_000_000,
        description="Problems read at the most: a longer source, or an endless one, is cut here, with a "
        "warning. All that are read are kept in memory, by the feeder.",
    )
    shuffle: bool = Field(True, description="Shuffle the problems anew in every epoch, from the seed.")
    reward_deadline_s: float = Field(
        10.0,
        gt=0,
        le=86_400,
        description="Seconds. A reward that takes longer is killed: it costs its sample, and nothing else.",
    )
    reward_workers: int = Field(1, gt=0, le=1024, description="Reward processes beside each generator.")

    @model_validator(mode="after")
    def _one_source(self) -> TaskSection:
        given = [name for name in ("python", "jsonl", "dataset") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"exactly one of python, jsonl and dataset is needed; found {found}")
        if not self.python and not self.reward:
            raise ValueError(f"task.reward is needed with task.{given[0]}: FILE.py:function")
        return self


class LoraSection(Section):
    """An adapter is trained beside the model's layers, and nothing else."""

    rank: int = Field(
        16, gt=0, le=16_384, description="A layer of m × n gets an adapter of rank · (m + n) weights."
    )
    alpha: float = Field(32.0, gt=0, le=1e6, description="What the adapter adds counts alpha / rank times.")
    targets: Literal["all-linear"] | list[Word] = Field(
        "all-linear",
        max_length=1000,
        description="Names of the layers that get one, such as [q_proj, v_proj]; all-linear: every linear "
        "layer but the head.",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _named(cls, targets: object) -> object:
        named = isinstance(targets, list) and targets and all(isinstance(one, str) and one for one in targets)
        if targets != "all-linear" and not named:
            raise ValueError(
                f"write all-linear, or names of layers: [q_proj, v_proj] (found {shown(targets)})"
            )
        return targets

    @property
    def scale(self) -> float:
        """How much of what the adapter says is added to what a layer says."""
        return self.alpha / self.rank


class ModelSection(Section):
    """The model to train. Exactly one of `path` and `build`."""

    path: FilePath | None = Field(None, description="A folder with a Hugging Face model and tokenizer.")
    build: FilePath | None = Field(
        None, description="FILE.py:function that writes such a folder: f(folder, seed, progress). Cached."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Of the weights that generators get and export writes. bfloat16 halves what is sent and "
        "generates faster on most machines; the trainer's own weights are float32 always.",
    )
    lora: LoraSection | None = Field(
        None,
        description="Train an adapter (LoRA, through peft) instead of all weights: only the adapter goes to "
        "the generators, and `streamrl export` merges it. `lora: {}` takes the defaults.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if bool(self.path) == bool(self.build):
            raise ValueError("exactly one of path and build is needed")
        return self


class SamplingSection(Section):
    """How samples are drawn. No top-p or top-k: the trainer could not reproduce the logprobs."""

    temperature: float = Field(
        1.0, gt=0, le=100, description="Logits are divided by it before a token is drawn. At least 0.01."
    )
    max_tokens: int = Field(256, gt=0, le=_MOST_TOKENS, description="Longest answer, in tokens.")
    max_prompt_tokens: int = Field(
        256,
        gt=0,
        le=_MOST_TOKENS,
        description="Longest prompt, in tokens; longer ones are left out, with a warning.",
    )

    @field_validator("temperature")
    @classmethod
    def _as_engines_take_it(cls, temperature: float) -> float:
        if temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"{temperature:g} is too low: vLLM raises it to {_LEAST_TEMPERATURE} by itself, and the "
                "logprobs would not be those of the trainer. Take at least so much"
            )
        return temperature


class AlgorithmSection(Section):
    """What is computed. Nothing here depends on where or how fast things run."""

    mode: Literal["sync", "async", "offline"] = Field(
        "sync",
        description="sync: samples of iteration i come from weights i. async: at most `staleness` older. "
        "offline: nothing is generated, the samples that another run has trained are trained again.",
    )
    recorded: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        description="offline: the id of that run, such as count-3. It shares store and broker.",
    )
    staleness: float = Field(
        0.0,
        ge=0,
        le=64,
        description="async: how many iterations old weights may be; 1.5: half the samples 2, the others 1.",
    )
    iterations: int = Field(
        100, gt=0, le=100_000_000, description="Iterations of the whole run; a resumed run may have more."
    )
    groups: int = Field(32, gt=0, le=1_000_000, description="Groups (prompts) an iteration.")
    group_size: int = Field(
        8, ge=2, le=65_536, description="Samples a prompt: the group's mean is the baseline."
    )
    optimizer_steps: int = Field(
        1,
        gt=0,
        le=1_000_000,
        description="Optimizer steps an iteration; groups are dealt to them across all lengths.",
    )
    learning_rate: float = Field(1e-6, gt=0, le=10, description="AdamW's, once it is warm.")
    warmup_steps: int = Field(
        0, ge=0, le=1_000_000_000, description="Optimizer steps over which the learning rate grows from 0."
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95),
        description="AdamW's: what is kept, at each step, of the mean gradient and of its square.",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=10,
        description="AdamW's: times the learning rate, the share of a weight that a step takes.",
    )
    max_grad_norm: float = Field(
        1.0, gt=0, le=1e12, description="A longer gradient is shortened to it; 1e12: never."
    )

    @model_validator(mode="after")
    def _modes(self) -> AlgorithmSection:
        if self.mode != "async" and self.staleness:
            why = "sync is on-policy, its staleness is 0" if self.mode == "sync" else "nothing is generated"
            raise ValueError(f"staleness {self.staleness:g} needs mode async; {why}")
        if (self.mode == "offline") != (self.recorded is not None):
            raise ValueError(
                "offline needs `recorded`: the id of the run whose samples are trained"
                if self.recorded is None
                else f"recorded is for mode offline; the mode is {self.mode}"
            )
        if self.iterations * self.groups >= ROUND:
            raise ValueError(f"iterations times groups must be less than {ROUND}: they number the groups")
        if self.groups % self.optimizer_steps:
            raise ValueError(
                f"groups ({self.groups}) must be a multiple of optimizer_steps ({self.optimizer_steps})"
            )
        return self

    @property
    def lookahead(self) -> float:
        """By how many iterations generation may run ahead of training."""
        return {"sync": 0.0, "async": self.staleness, "offline": math.inf}[self.mode]


class LengthsSection(Section):
    """Predicted length classes: the partitions of prompts and samples."""

    classes: int = Field(
        3,
        ge=1,
        le=64,
        description="Classes, each a partition of both topics. More tell lengths apart more finely, and cost "
        "the broker a little each.",
    )
    edges: Literal["learned"] | list[Annotated[float, Field(gt=0, le=_MOST_TOKENS)]] = Field(
        "learned",
        max_length=63,
        description="Class edges in tokens (classes - 1 of them), or quantiles of what is predicted.",
    )
    backbone: FilePath = Field(
        "none",
        description="A folder with a Hugging Face model whose hidden states the length ranker reads as well; "
        "none: the ranker's own small network reads prompts alone.",
    )
    start: FilePath | None = Field(
        None,
        description="A ranker to start with, as `streamrl ranker` prints it: a URL, or a key in the run's "
        "store. Without it the first iteration is not ranked.",
    )

    @model_validator(mode="after")
    def _edges_fit(self) -> LengthsSection:
        if isinstance(self.edges, list):
            if len(self.edges) != self.classes - 1:
                raise ValueError(
                    f"{self.classes} classes have {self.classes - 1} edges between them; "
                    f"edges has {len(self.edges)}"
                )
            if sorted(set(self.edges)) != self.edges:
                raise ValueError(f"edges must grow: {shown(self.edges)}")
        return self


class TrainerSection(Section):
    """How the trainer does its work."""

    learner: Literal["torch", "deepspeed"] = Field(
        "torch",
        description="torch: each rank holds the model and the optimizer's state. deepspeed: they are divided "
        "among the ranks, see zero_stage.",
    )
    ranks: int = Field(
        1,
        gt=0,
        le=1024,
        description="Processes that train together: a GPU each, or `threads` CPU threads each.",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        1,
        description="deepspeed: what is divided among the ranks. 0: nothing. 1: the optimizer's state. "
        "2: gradients as well. 3: weights as well.",
    )
    threads: int = Field(1, gt=0, le=1024, description="CPU threads of a rank.")
    microbatch_tokens: int = Field(
        8192,
        gt=0,
        le=100_000_000,
        description="Most tokens of a micro-batch: what memory is enough for.",
    )
    compose: Literal["auto", "admission", "arrival"] = Field(
        "auto",
        description="admission: which groups are trained together is decided before they are generated, so "
        "that a step has the same bits whatever finished first. arrival: whatever is there, which costs "
        "less. auto: admission in sync mode, arrival in async mode.",
    )
    bundle_tokens: int = Field(
        512,
        gt=0,
        le=100_000_000,
        description="Groups are trained in bundles of about so many tokens (arrival: of at least so many): "
        "small ones start sooner, large ones cost less.",
    )
    least_microbatches: int | None = Field(
        None,
        gt=0,
        le=65_536,
        description="What is trained together is cut into at least so many micro-batches, if it has so many "
        "samples, so that each rank has work; without it as many as there are ranks. A step's bits depend on "
        "this and, with exact_sums, not on the ranks.",
    )
    exact_sums: bool | None = Field(
        None,
        description="Add gradients in fixed point: a step has the same bits whatever finished first, and "
        "whichever rank computed it. By default true with learner torch; deepspeed can't.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Compute activations again on the way back: a third more work, much less memory."
    )
    logits_chunk: int = Field(
        4096, gt=0, le=100_000_000, description="Tokens whose logits are in memory at a time."
    )
    checkpoint_every: int = Field(10, gt=0, le=100_000_000, description="Iterations between checkpoints.")
    keep_checkpoints: int = Field(
        2,
        gt=0,
        le=10_000,
        description="So many of the newest checkpoints are kept in the store: weights, optimizer and all.",
    )
    keep_weights: int = Field(
        16, ge=4, le=1_000_000, description="At least so many of the newest weights versions are kept."
    )

    @model_validator(mode="after")
    def _sums_fit(self) -> TrainerSection:
        if self.exact_sums and self.learner == "deepspeed":
            raise ValueError(
                "exact_sums is of learner torch: DeepSpeed adds gradients as floats, among ranks too. "
                "Leave exact_sums out, or take learner: torch"
            )
        return self

    @property
    def sums_exactly(self) -> bool:
        """Whether gradients are added in fixed point."""
        return self.learner == "torch" if self.exact_sums is None else self.exact_sums

    @property
    def parts(self) -> int:
        """Into how many micro-batches at least what is trained together is cut."""
        return self.least_microbatches or self.ranks


class GeneratorSection(Section):
    """How a generator does its work."""

    slots: int = Field(64, gt=0, le=65_536, description="Samples that one generator runs at once.")
    threads: int = Field(
        1, gt=0, le=1024, description="CPU threads of a generator: more than one rarely pays."
    )
    kv_cache_mib: int = Field(64, gt=0, le=16_777_216, description="MiB of KV cache of a generator on a CPU.")
    batch_invariant: bool = Field(
        True, description="A sample's bits don't depend on what else is in the batch (float32 on CPUs)."
    )
    on_update: Literal["continue", "recompute", "wait"] = Field(
        "continue",
        description="What becomes of running samples when there are new weights. continue: they go on with "
        "them, on the KV cache of the old ones. recompute: they go on with them, and their KV cache is "
        "computed anew, so that each token is drawn as the new weights alone would. wait: the new weights "
        "are installed when all is made that the old ones may make, so each sample has one version. A "
        "sample says which weights made it from which token on.",
    )


class DispatchSection(Section):
    """Which generator makes which sample."""

    policy: Literal["deadline", "longest_first", "round_robin", "algorithm2", "random"] = Field(
        "deadline",
        description="deadline: by expected makespan under the predictions' measured errors. The others are "
        "to compare with: one queue, longest first; dealt in turn; the paper's two pools; shuffled.",
    )
    prefill_tokens_per_s: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="deadline: running samples may move to a generator where they end sooner, if that is "
        "expected to pay for their tokens so far, of which it computes so many a second. Without it none "
        "moves.",
    )
    silence_s: float = Field(
        10.0,
        gt=0,
        le=86_400,
        description="Seconds. A generator not heard of for so long is gone: others make its samples.",
    )


class EvaluationSection(Section):
    """Held-out problems are sampled before the first and after the last iteration, and in between."""

    problems: int = Field(0, ge=0, le=1_000_000, description="How many held-out problems; 0: no evaluation.")
    every: int = Field(
        0,
        ge=0,
        le=100_000_000,
        description="Also after every so many iterations; 0: only before and after.",
    )
    per_problem: int = Field(1, gt=0, le=65_536, description="Samples of each held-out problem.")


class KafkaSection(Section):
    """The Kafka cluster. Credentials come from the environment: STREAMRL_KAFKA_*."""

    bootstrap_servers: Servers = Field(
        "local",
        description="host:port,host:port of your cluster, or `local`: the one that `streamrl up` runs.",
    )
    replication: int = Field(
        1, gt=0, le=32, description="Replicas of each topic; 3 on a cluster of your own."
    )
    retention_hours: int = Field(
        24 * 14, gt=0, le=1_000_000, description="Hours for which samples and prompts are kept."
    )


class SiteSection(Section):
    """A site far from the object store: a relay fetches weights once for all its generators."""

    cache: StoreUrl = Field(
        "local",
        description="Where the site keeps weights: file:///path, s3://bucket/prefix; `local`: a folder of "
        "the machine that its processes run on.",
    )
    relays: int = Field(
        1, gt=0, le=256, description="Relays that share the fetching; more have more connections."
    )
    generators: int = Field(1, gt=0, le=4096, description="Generator processes at the site.")
    elsewhere: bool = Field(
        False,
        description="Its processes are not started on this machine. A run that is a Prefect flow calls the "
        "deployment `sync-weights/NAME`; else say `streamrl join RUN --site NAME` there.",
    )


class PlacementSection(Section):
    """Where things run. The same algorithm runs anywhere by changing only this section."""

    kafka: KafkaSection = KafkaSection()
    store: StoreUrl = Field(
        "local",
        description="fsspec URL for weights and checkpoints: s3://bucket/prefix, file:///path; `local`.",
    )
    generators: int = Field(
        1,
        ge=0,
        le=4096,
        description="Generator processes that the run starts; more may `streamrl join` it at any moment.",
    )
    sites: dict[PlainName, SiteSection] = Field(
        {}, max_length=1000, description="Far sites by name, each with generators."
    )
    restarts: int = Field(
        3,
        ge=0,
        le=1_000_000,
        description="How often within an hour a process that dies is started again, after pauses that grow. "
        "If it dies more often, a trainer or feeder ends the run; a generator or relay is left out, and "
        "tried again every ten minutes, while others make samples.",
    )


class DeadlinesSection(Section):
    """Nothing waits for ever: seconds after which a process ends, and says what it waited for."""

    start_s: float = Field(300.0, gt=0, le=_MONTH_S, description="For a process to be ready.")
    progress_s: float = Field(
        600.0,
        gt=0,
        le=_MONTH_S,
        description="In which nothing moves anywhere in the run: no token, sample, step or byte, and no "
        "process that works. A step or an answer may take as long as it likes.",
    )


class RunSpec(Section):
    """A run."""

    run: PlainName = Field(
        description="Name: small letters, digits and dashes. Each start gets a number: count-1."
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**63 - 1,
        description="All that is drawn follows from it: order of problems, samples, weights.",
    )
    task: TaskSection
    model: ModelSection
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    loss: LossSection = LossSection()
    lengths: LengthsSection = LengthsSection()
    trainer: TrainerSection = TrainerSection()
    generator: GeneratorSection = GeneratorSection()
    dispatch: DispatchSection = DispatchSection()
    evaluation: EvaluationSection = EvaluationSection()
    placement: PlacementSection = PlacementSection()
    deadlines: DeadlinesSection = DeadlinesSection()
    report: FilePath = Field("runs", description="Folder in which each run gets its report folder.")

    @property
    def composes_on_arrival(self) -> bool:
        """Whether the trainer takes what is there, rather than what was decided at admission."""
        if self.trainer.compose == "auto":
            return self.algorithm.mode != "sync"
        return self.trainer.compose == "arrival"

    def evaluates(self, version: int) -> bool:
        """Whether a version is measured on held-out problems."""
        if not self.evaluation.problems:
            return False
        every = self.evaluation.every
        return version in (0, self.algorithm.iterations) or (every > 0 and version % every == 0)

    def _check_loss(self) -> None:
        loss, algorithm = self.loss, self.algorithm
        of_others = algorithm.mode != "sync" or algorithm.optimizer_steps > 1
        if loss.kind == "rloo" and of_others and loss.correction == "none":
            raise ValueError(
                "rloo takes each sample for one of the trained weights: set loss.correction to truncated "
                "with algorithm.mode async or offline, and with several optimizer_steps"
            )
        if algorithm.mode == "offline" and loss.kind != "tb" and not loss.kl and loss.correction != "none":
            raise ValueError(
                "offline, nothing keeps the policy near what the data did: set loss.kl (reference: samples), "
                "or leave loss.correction at none, so that ratios to the data are clipped"
            )
        if (loss.overlong_tokens or 0) >= self.sampling.max_tokens:
            raise ValueError(
                f"loss.overlong_tokens ({loss.overlong_tokens}) must be less than sampling.max_tokens "
                f"({self.sampling.max_tokens}), or every answer would lose reward"
            )

    @model_validator(mode="after")
    def _fits(self) -> RunSpec:
        longest = self.sampling.max_tokens + self.sampling.max_prompt_tokens
        if longest > self.trainer.microbatch_tokens:
            raise ValueError(
                f"trainer.microbatch_tokens ({self.trainer.microbatch_tokens}) must hold the longest sample: "
                f"sampling.max_prompt_tokens + sampling.max_tokens = {longest}"
            )
        if self.model.lora and self.trainer.learner == "deepspeed":
            raise ValueError("model.lora is for trainer.learner torch: an adapter is too small to divide")
        self._check_loss()
        if self.algorithm.mode == "async" and self.trainer.keep_weights <= self.algorithm.lookahead:
            raise ValueError(
                f"trainer.keep_weights ({self.trainer.keep_weights}) must be more than algorithm.staleness "
                f"({self.algorithm.staleness:g}): samples are checked against the weights that made them"
            )
        if self.algorithm.mode == "offline" and self.loss.resample:
            raise ValueError("loss.resample draws new groups, and offline nothing is generated")
        if self.evaluation.problems * (self.algorithm.iterations + 1) >= ROUND:
            raise ValueError(
                f"evaluation.problems times algorithm.iterations must be less than {ROUND}: they number "
                "the groups"
            )
        if self.task.jsonl and self.evaluation.problems and not self.task.held_out_jsonl:
            raise ValueError("evaluation.problems needs task.held_out_jsonl with a JSONL task")
        return self

"""The run file: one YAML file describes all of a run. `schemas.loading` reads it, this file validates it."""

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
    """The task to learn: problems and a reward. Set exactly one of `python`, `jsonl` and `dataset`."""

    python: FilePath | None = Field(
        None,
        description="A .py file (relative to the run file) or a module that has problems() and reward().",
    )
    jsonl: FilePath | None = Field(
        None, description="A JSONL file with one problem a line. It needs `reward`."
    )
    dataset: FilePath | None = Field(
        None, description="A Hugging Face dataset: a saved folder, or a name. It needs `reward`."
    )
    reward: FilePath | None = Field(
        None,
        description="The reward function: FILE.py:function or module:function. By default `reward` of the "
        "python task.",
    )
    held_out_jsonl: FilePath | None = Field(
        None, description="A JSONL file of held-out problems. Evaluations of a JSONL task need it."
    )
    prompt_field: Word = Field("prompt", description="The field of a problem that holds the prompt's text.")
    id_field: Word = Field(
        "id",
        description="The field that names a problem, by text or a number. A problem without it is named by "
        "a hash of its prompt, and problems with the same prompt are told apart by a number.",
    )
    train_split: Word = Field("train", description="The name of the split whose problems are trained.")
    held_out_split: Word = Field(
        "held_out", description="The name of the split whose problems are evaluated."
    )
    limit: int = Field(
        100_000,
        gt=0,
        le=100_000_000,
        description="Maximum number of problems to read. A longer source, or an endless one, is cut here "
        "with a warning. The feeder keeps all that it reads in memory.",
    )
    shuffle: bool = Field(True, description="Shuffle the problems anew in every epoch, from the seed.")
    reward_deadline_s: float = Field(
        10.0,
        gt=0,
        le=86_400,
        description="Seconds that a reward may take. A slower one is killed; that costs its sample and "
        "nothing else.",
    )
    reward_workers: int = Field(
        1,
        gt=0,
        le=1024,
        description="Reward processes beside each generator. Take more if rewards take longer than samples.",
    )

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
        16,
        gt=0,
        le=16_384,
        description="The size of the adapter: a layer of m × n gets rank · (m + n) weights.",
    )
    alpha: float = Field(
        32.0,
        gt=0,
        le=1e6,
        description="The adapter's output is multiplied by alpha / rank before it is added to the layer's.",
    )
    targets: Literal["all-linear"] | list[Word] = Field(
        "all-linear",
        max_length=1000,
        description="The names of the layers that get an adapter, such as [q_proj, v_proj]. all-linear: "
        "every linear layer but the head.",
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
        """The factor of the adapter's output before it is added to the layer's."""
        return self.alpha / self.rank


class ModelSection(Section):
    """The model to train. Set exactly one of `path` and `build`."""

    path: FilePath | None = Field(None, description="A folder with a Hugging Face model and its tokenizer.")
    build: FilePath | None = Field(
        None,
        description="FILE.py:function that writes such a folder: f(folder, seed, progress). The folder is "
        "built once and kept.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="The type of the weights that generators get and export writes. bfloat16 halves the "
        "bytes that are sent and generates faster on most machines. The trainer's own weights "
        "are always float32.",
    )
    lora: LoraSection | None = Field(
        None,
        description="Train an adapter (LoRA, through peft) instead of all weights. Only the adapter goes to "
        "the generators, and `streamrl export` merges it. `lora: {}` takes the defaults.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if bool(self.path) == bool(self.build):
            raise ValueError("exactly one of path and build is needed")
        return self


class SamplingSection(Section):
    """Settings for drawing samples. No top-p or top-k: the trainer could not reproduce the logprobs."""

    temperature: float = Field(
        1.0, gt=0, le=100, description="Logits are divided by it before a token is drawn. At least 0.01."
    )
    max_tokens: int = Field(
        256, gt=0, le=_MOST_TOKENS, description="Maximum tokens of an answer. A longer one ends there."
    )
    max_prompt_tokens: int = Field(
        256,
        gt=0,
        le=_MOST_TOKENS,
        description="Maximum tokens of a prompt. Problems with a longer one are left out, with a warning.",
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
    """The computation of a run. Nothing here depends on where or how fast things run."""

    mode: Literal["sync", "async", "offline"] = Field(
        "sync",
        description="sync: weights i draw the samples of iteration i. async: weights up to `staleness` "
        "iterations older may draw them, so that generation and training overlap. offline: "
        "nothing is generated; the samples of a recorded run are trained again.",
    )
    recorded: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        description="offline: the id of the recorded run, such as count-3. It must lie in the same store "
        "and broker.",
    )
    staleness: float = Field(
        0.0,
        ge=0,
        le=64,
        description="async: how many iterations old the weights may be that draw a sample. 1.5: half of the "
        "samples 2, the others 1. More hides longer tails and makes samples older.",
    )
    iterations: int = Field(
        100, gt=0, le=100_000_000, description="Iterations of the whole run. A resumed run may have more."
    )
    groups: int = Field(
        32, gt=0, le=1_000_000, description="Groups of an iteration. Each group has one prompt."
    )
    group_size: int = Field(
        8, ge=2, le=65_536, description="Samples of a group. Their mean reward is the baseline of each."
    )
    optimizer_steps: int = Field(
        1,
        gt=0,
        le=1_000_000,
        description="Optimizer steps of an iteration. Its groups are dealt to them across all lengths.",
    )
    learning_rate: float = Field(1e-6, gt=0, le=10, description="AdamW's learning rate once it is warm.")
    warmup_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="Optimizer steps over which the learning rate grows from 0. 0: it is full at once.",
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95),
        description="AdamW's betas: the shares of the mean gradient and of its mean square that each step "
        "keeps.",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=10,
        description="AdamW's weight decay: each step shrinks a weight by this share times the learning "
        "rate. 0: none.",
    )
    max_grad_norm: float = Field(
        1.0,
        gt=0,
        le=1e12,
        description="Maximum norm of a gradient. A longer gradient is scaled down to it; 1e12 never scales.",
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
        """How many iterations generation may run ahead of training."""
        return {"sync": 0.0, "async": self.staleness, "offline": math.inf}[self.mode]


class LengthsSection(Section):
    """Predicted length classes: the partitions of prompts and samples."""

    classes: int = Field(
        3,
        ge=1,
        le=64,
        description="Length classes. Each is a partition of the topics of prompts and samples. More classes "
        "tell lengths apart more finely, and cost the broker a little each.",
    )
    edges: Literal["learned"] | list[Annotated[float, Field(gt=0, le=_MOST_TOKENS)]] = Field(
        "learned",
        max_length=63,
        description="The lengths, in tokens, at which one class ends and the next begins (classes - 1 of "
        "them). learned: quantiles of the predicted lengths.",
    )
    backbone: FilePath = Field(
        "none",
        description="A folder with a Hugging Face model whose hidden states the length ranker reads too, at "
        "the cost of running it on each prompt. none: the ranker's own small network reads the "
        "prompt alone.",
    )
    start: FilePath | None = Field(
        None,
        description="A trained ranker to start with, as `streamrl ranker` prints it: a URL, or a key in the "
        "run's store. Without it the ranker knows nothing in the first iteration.",
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
    """Settings of the trainer."""

    learner: Literal["torch", "deepspeed"] = Field(
        "torch",
        description="torch: each rank holds the model and the optimizer's state. deepspeed: the ranks share "
        "them out, see zero_stage.",
    )
    ranks: int = Field(
        1,
        gt=0,
        le=1024,
        description="Processes that train together. Each has a GPU, or `threads` CPU threads.",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        1,
        description="deepspeed: the things that the ranks share out. 0: nothing. 1: the optimizer's state. "
        "2: gradients as well. 3: weights as well. A higher stage takes less memory and sends "
        "more.",
    )
    threads: int = Field(1, gt=0, le=1024, description="CPU threads of a rank.")
    microbatch_tokens: int = Field(
        8192,
        gt=0,
        le=100_000_000,
        description="Maximum tokens in a micro-batch. Set it to what fits in memory; it must hold the "
        "longest sample.",
    )
    compose: Literal["auto", "admission", "arrival"] = Field(
        "auto",
        description="admission: the groups that are trained together are fixed before they are generated, "
        "so that a step has the same bits whatever finished first. arrival: the trainer takes "
        "the groups that have come, which is faster. auto: admission in sync mode, arrival in "
        "async mode.",
    )
    bundle_tokens: int = Field(
        512,
        gt=0,
        le=100_000_000,
        description="Tokens of a bundle, about (arrival: at least). Small bundles are trained sooner, large "
        "ones cost less.",
    )
    least_microbatches: int | None = Field(
        None,
        gt=0,
        le=65_536,
        description="Minimum number of micro-batches of a bundle that has enough samples, so that each rank "
        "has work. By default the number of ranks. A step's bits depend on this number and, "
        "with exact_sums, not on the ranks.",
    )
    exact_sums: bool | None = Field(
        None,
        description="Add gradients in fixed point, so that a step has the same bits whatever finished first "
        "and whichever rank computed it. By default true with learner torch, for 3 % of a step "
        "on a CPU; learner deepspeed can't.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Compute activations again on the backward pass. That is a third more work and takes "
        "much less memory.",
    )
    logits_chunk: int = Field(
        4096,
        gt=0,
        le=100_000_000,
        description="Tokens whose logits are in memory at a time. Fewer take less memory and more time.",
    )
    checkpoint_every: int = Field(
        10,
        gt=0,
        le=100_000_000,
        description="Iterations between two checkpoints. A trainer that is killed takes its steps since the "
        "last one again.",
    )
    keep_checkpoints: int = Field(
        2,
        gt=0,
        le=10_000,
        description="Number of checkpoints that are kept in the store: the newest ones, each with weights "
        "and optimizer state.",
    )
    keep_weights: int = Field(
        16,
        ge=4,
        le=1_000_000,
        description="Minimum number of weights versions that are kept: the newest ones.",
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
        """Minimum number of micro-batches of a bundle."""
        return self.least_microbatches or self.ranks


class GeneratorSection(Section):
    """Settings of each generator."""

    slots: int = Field(
        64,
        gt=0,
        le=65_536,
        description="Samples that one generator draws at once. More give more tokens a second, each later.",
    )
    threads: int = Field(
        1, gt=0, le=1024, description="CPU threads of a generator. More than one rarely pays."
    )
    kv_cache_mib: int = Field(64, gt=0, le=16_777_216, description="MiB of KV cache of a generator on a CPU.")
    batch_invariant: bool = Field(
        True,
        description="Make a sample's bits independent of the samples that are drawn beside it (float32 on "
        "CPUs).",
    )
    on_update: Literal["continue", "recompute", "wait"] = Field(
        "continue",
        description="The way in which new weights reach samples that are being drawn. continue: a sample "
        "goes on with the new weights, on the KV cache of the old ones. recompute: it goes on "
        "with them, and its KV cache is computed anew, so that each token is drawn as the new "
        "weights alone would. wait: the new weights are installed when all samples of the old "
        "ones are done, so each sample has one version. A sample says which weights drew it "
        "from which token on.",
    )


class DispatchSection(Section):
    """The choice of the generator that makes each sample."""

    policy: Literal["deadline", "longest_first", "round_robin", "algorithm2", "random"] = Field(
        "deadline",
        description="The rule that gives samples to generators. deadline: by expected makespan under the "
        "predictions' measured errors. The others are to compare with: longest_first is one "
        "queue, round_robin deals in turn, algorithm2 is the paper's two pools, random "
        "shuffles.",
    )
    prefill_tokens_per_s: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="deadline: tokens a second that a generator prefills. With it, a running sample may "
        "move to a generator where it ends sooner, if that pays for computing its tokens there "
        "again. Without it no sample moves.",
    )
    silence_s: float = Field(
        10.0,
        gt=0,
        le=86_400,
        description="Seconds without a report after which a generator counts as gone, and others make its "
        "samples.",
    )


class EvaluationSection(Section):
    """Held-out problems are sampled before the first and after the last iteration, and in between."""

    problems: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Number of held-out problems that an evaluation samples. 0: no evaluation.",
    )
    every: int = Field(
        0,
        ge=0,
        le=100_000_000,
        description="Iterations between two evaluations. 0: only before the first and after the last "
        "iteration.",
    )
    per_problem: int = Field(
        1, gt=0, le=65_536, description="Samples of each held-out problem. More make the figures less noisy."
    )


class KafkaSection(Section):
    """The Kafka cluster. Credentials come from the environment: STREAMRL_KAFKA_*."""

    bootstrap_servers: Servers = Field(
        "local",
        description="Your cluster, as host:port,host:port. `local`: the broker that `streamrl up` runs.",
    )
    replication: int = Field(
        1, gt=0, le=32, description="Replicas of each topic. Take 3 on a cluster of your own."
    )
    retention_hours: int = Field(
        24 * 14,
        gt=0,
        le=1_000_000,
        description="Hours for which samples and prompts are kept. Replay needs them.",
    )


class SiteSection(Section):
    """A site far from the object store: a relay fetches weights once for all its generators."""

    cache: StoreUrl = Field(
        "local",
        description="The place where the site keeps weights: file:///path or s3://bucket/prefix. `local`: a "
        "folder of the machine on which its processes run.",
    )
    relays: int = Field(
        1,
        gt=0,
        le=256,
        description="Relays that fetch weights for the site and share the work. More have more connections.",
    )
    generators: int = Field(1, gt=0, le=4096, description="Generator processes at the site.")
    elsewhere: bool = Field(
        False,
        description="Do not start the site's processes on this machine. A run that is a Prefect flow calls "
        "the deployment `sync-weights/NAME`; otherwise say `streamrl join RUN --site NAME` "
        "there.",
    )


class PlacementSection(Section):
    """The places where things run. To run the same algorithm elsewhere, change only this section."""

    kafka: KafkaSection = KafkaSection()
    store: StoreUrl = Field(
        "local",
        description="The fsspec URL for weights and checkpoints: s3://bucket/prefix or file:///path. "
        "`local`: a folder of this machine.",
    )
    generators: int = Field(
        1,
        ge=0,
        le=4096,
        description="Generator processes that the run starts. More may `streamrl join` it at any moment.",
    )
    sites: dict[PlainName, SiteSection] = Field(
        {}, max_length=1000, description="Far sites by name, each with generators of its own."
    )
    restarts: int = Field(
        3,
        ge=0,
        le=1_000_000,
        description="Number of times within an hour that a process which dies is started again, after "
        "pauses that grow. A trainer or feeder that dies more often ends the run. A generator "
        "or relay that does is left out, and tried again every ten minutes while others make "
        "samples.",
    )


class DeadlinesSection(Section):
    """Deadlines. A process that waits longer ends, and says what it waited for."""

    start_s: float = Field(
        300.0, gt=0, le=_MONTH_S, description="Seconds that a process may take to be ready."
    )
    progress_s: float = Field(
        600.0,
        gt=0,
        le=_MONTH_S,
        description="Seconds without any movement in the whole run (no token, sample, step or byte, and no "
        "process at work) after which whoever waits gives up. A step or an answer may take as "
        "long as it likes.",
    )


class RunSpec(Section):
    """A run, as its run file describes it."""

    run: PlainName = Field(
        description="The run's name: small letters, digits and dashes. Each start gets a number: count-1."
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**63 - 1,
        description="The seed of everything that is drawn: the order of problems, samples, fresh weights.",
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
    report: FilePath = Field("runs", description="The folder in which each run gets its report folder.")

    @property
    def composes_on_arrival(self) -> bool:
        """Whether the trainer takes the groups that have come, rather than those fixed at admission."""
        if self.trainer.compose == "auto":
            return self.algorithm.mode != "sync"
        return self.trainer.compose == "arrival"

    def evaluates(self, version: int) -> bool:
        """Whether a version is evaluated on held-out problems."""
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

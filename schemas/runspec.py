"""The run file: one YAML file describes all of a run. `schemas.loading` reads it, this file validates it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializeAsAny, field_validator, model_validator

from schemas.addresses import FilePath, HostName, HostOrNetwork, PlainText, Servers, StoreUrl, Word
from schemas.algorithm import MOST_OF_GROUP, MOST_OF_STEP, MOST_TOKENS, AlgorithmSection, SamplingSection
from schemas.balancing import BalanceSection
from schemas.dispatching import POLICIES, DispatchSection
from schemas.generation import ENGINES, GeneratorSection
from schemas.identity import ROUND
from schemas.losses import LOSSES, LossSection
from schemas.machines import MachinesSection, check_uses
from schemas.seams import Seam
from schemas.section import Section
from schemas.shortening import shown
from schemas.tracking import TRACKERS, TrackerSection
from schemas.training import LEARNERS, TrainerSection

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,48}")
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
    dataset_config: Word | None = Field(
        None, description="The configuration of the dataset, such as `main`, if it has several."
    )
    reward: FilePath | None = Field(
        None,
        description="The reward function: FILE.py:function or module:function. By default `reward` of the "
        "python task.",
    )
    held_out_jsonl: FilePath | None = Field(
        None, description="A JSONL file of held-out problems. Evaluations of a JSONL task need it."
    )
    prompt_field: Word = Field(
        "prompt",
        description="The field of a problem that holds the prompt: text, or a list of messages. A problem "
        "without `prompt` may have `messages`.",
    )
    chat: bool = Field(
        False,
        description="Put a prompt that is text into the model's chat template, as a message of the user. A "
        "prompt that is a list of messages always goes through it.",
    )
    system: PlainText | None = Field(
        None, description="The system message of each prompt that has none. Prompts must be messages."
    )
    chat_template: FilePath | None = Field(
        None,
        description="A file with a chat template in Jinja. By default the one of the model's tokenizer.",
    )
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
    max_failed_rewards: float = Field(
        0.5,
        ge=0,
        le=1,
        description="The share of the samples of two iterations in a row that may have no reward, because it "
        "raised, took too long or was no finite number. With more the run ends, and says why. 1: only a step "
        "in which no sample has a reward ends it.",
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
        if self.dataset_config and not self.dataset:
            raise ValueError("task.dataset_config is for task.dataset")
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

    path: FilePath | None = Field(
        None,
        description="A folder with a Hugging Face model and its tokenizer, or a name on the Hub, such as "
        "Qwen/Qwen2.5-0.5B-Instruct. A name is taken from the Hugging Face cache, and fetched if it is not "
        "there.",
    )
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

    follow_routes: bool = Field(
        True,
        description="For a mixture of experts: generators record which experts each layer took for each "
        "token, and the trainer takes the same ones, weighed by its own router. So both compute with the "
        "same experts, although they round differently. Costs at most a byte in a sample's record for each "
        "token, layer and expert taken (two beyond 256 experts). Other models have no routes.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if bool(self.path) == bool(self.build):
            raise ValueError("exactly one of path and build is needed")
        return self


class LengthsSection(Section):
    """Predicted length classes: the partitions of prompts and samples."""

    classes: int = Field(
        3,
        ge=1,
        le=64,
        description="Length classes. Each is a partition of the topics of prompts and samples. More classes "
        "tell lengths apart more finely, and cost the broker a little each.",
    )
    edges: Literal["learned"] | list[Annotated[float, Field(gt=0, le=MOST_TOKENS)]] = Field(
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
        1,
        gt=0,
        le=MOST_OF_GROUP,
        description="Samples of each held-out problem. More make the figures less noisy.",
    )

    @model_validator(mode="after")
    def _fits_a_record(self) -> EvaluationSection:
        if (samples := self.problems * self.per_problem) > MOST_OF_STEP:
            raise ValueError(
                f"evaluation.problems times per_problem is {samples} samples; the record of an evaluation "
                f"holds {MOST_OF_STEP}"
            )
        return self


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
        description="Hours for which samples and prompts are kept. Replay needs them. "
        "A resumed run may have more.",
    )


class ArchiveSection(Section):
    """The run archives its records in the object store, as Parquet, before Kafka's retention removes them."""

    every_minutes: float = Field(
        60.0,
        ge=1,
        le=100_000,
        description="Minutes from one pass to the next, at most half of `kafka.retention_hours`; one more "
        "comes at the run's end. Each pass adds files to the store, so a pass a minute makes queries slow.",
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
    generators: int = Field(
        1, ge=0, le=4096, description="Generator processes at the site. With 0 the run starts nothing for it."
    )
    elsewhere: bool = Field(
        False,
        description="Do not start the site's processes on this machine. A run that is a Prefect flow calls "
        "the deployment `sync-weights/NAME`; otherwise say `streamrl join RUN --site NAME` "
        "there.",
    )
    link_gbit_s: float | None = Field(
        None,
        gt=0,
        le=100_000,
        description="Gigabits a second that come to the site from the run's object store. `streamrl plan` "
        "needs it for machines at the site; a run does not.",
    )
    link_latency_ms: float = Field(
        0.0,
        ge=0,
        le=600_000,
        description="Milliseconds that a byte takes from the run's object store to the site.",
    )


class RanksSection(Section):
    """Ranks of the trainer on other machines, which train as those on the trainer's machine do."""

    elsewhere: int = Field(
        0,
        ge=0,
        le=1023,
        description="Of `trainer.ranks`, those on other machines. The trainer waits for them: say `streamrl "
        "join RUN --ranks N` there.",
    )
    address: HostName = Field(
        "127.0.0.1",
        description="The address of the trainer's machine at which the machines of the other ranks reach it. "
        "Ranks talk unencrypted, on ports that are drawn: take an address in a network that is yours alone.",
    )
    deployments: dict[Word, Annotated[int, Field(ge=1, le=1023)]] = Field(
        {},
        max_length=1023,
        description="Prefect deployments of the flow `join-run` in the work pools of those machines, each "
        "with the number of ranks there, such as `{join-run/host2: 8}`: a run that is a Prefect flow calls "
        "them as it starts, and again if their flow runs end before it does.",
    )


class EngineRanksSection(Section):
    """Ranks of engines on other machines, which compute each step with those on the generator's machine."""

    elsewhere: int = Field(
        0,
        ge=0,
        le=63,
        description="Of the ranks of each engine (`tensor_parallel` × `pipeline_parallel`), those on other "
        "machines. A generator waits for them: say `streamrl join RUN --engine-ranks N` there. Each step "
        "then waits for the network, several times a layer.",
    )
    address: HostOrNetwork = Field(
        "127.0.0.1",
        description="The address of the generator's machine at which the machines of the other ranks reach "
        "it, or its network, such as 10.0.0.0/24, where generators are on several machines. Ranks talk "
        "unencrypted, on ports that are drawn: take a network that is yours alone.",
    )


class PlacementSection(Section):
    """The places where things run. To run the same algorithm elsewhere, change only this section."""

    kind: Literal["disaggregated", "colocated"] = Field(
        "disaggregated",
        description="disaggregated: engines draw while the learner computes. colocated: on this machine they "
        "take turns, so that each may have all cores (`generator.threads`, `trainer.threads`) or the whole "
        "GPU. The learner computes when all samples of an iteration are there, and the engines rest "
        "meanwhile. Other machines, as those of far sites, have cores of their own and take no turns.",
    )
    kafka: KafkaSection = KafkaSection()
    store: StoreUrl = Field(
        "local",
        description="The fsspec URL for weights and checkpoints: s3://bucket/prefix or file:///path. "
        "`local`: a folder of this machine.",
    )
    archive: ArchiveSection | None = Field(
        None,
        description="`archive: {}` keeps the run's records in the object store for ever. Replays, resumes, "
        "offline runs and `streamrl sql` then read them when Kafka has let them go.",
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
    ranks: RanksSection = RanksSection()
    engine_ranks: EngineRanksSection = EngineRanksSection()
    share_gpus: bool = Field(
        False,
        description="Let generators share GPUs with each other and with the trainer's ranks, where a machine "
        "has fewer of them. Ranks never share one with each other. By default each has one of its own, or "
        "the run file is refused.",
    )
    machines: dict[PlainName, MachinesSection] = Field(
        {},
        max_length=100,
        description="Machines by name that `streamrl plan` may use. A run starts nothing because of them. "
        "Without them a plan is for the machine on which it is asked for.",
    )
    balance: BalanceSection | None = Field(
        None,
        description="`balance: {most: 4}` lets the run change the number of its generators, from "
        "`generators` on, as the times of both sides call for.",
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

    @property
    def takes_turns(self) -> bool:
        """Whether engines and learner on one machine take turns."""
        return self.kind == "colocated"

    @model_validator(mode="after")
    def _machines_make_up_a_run(self) -> PlacementSection:
        check_uses(self.machines, {name: site.link_gbit_s for name, site in self.sites.items()})
        return self

    @model_validator(mode="after")
    def _begins_in_bounds(self) -> PlacementSection:
        if self.balance is not None and self.generators > self.balance.most:
            raise ValueError(
                f"generators ({self.generators}) is the number to begin with: it may not be above "
                f"balance.most ({self.balance.most})"
            )
        return self

    @model_validator(mode="after")
    def _archived_in_time(self) -> PlacementSection:
        longest = self.kafka.retention_hours * 30
        if self.archive is not None and self.archive.every_minutes > longest:
            raise ValueError(
                f"archive.every_minutes is {self.archive.every_minutes:g}; records that Kafka keeps for "
                f"{self.kafka.retention_hours} hours have to be archived every {longest} minutes at least"
            )
        return self


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


class PrometheusSection(Section):
    """The run serves figures of itself and of all its processes at /metrics, for a Prometheus server."""

    port: int = Field(
        9464,
        ge=0,
        le=65_535,
        description="The port; if it is taken, the next free one. 0: any free one. Only this machine can "
        "reach it, unless STREAMRL_LISTEN names an address.",
    )


SEAMS: dict[str, Seam[Any]] = {
    "loss": LOSSES, "trainer": LEARNERS, "generator": ENGINES, "dispatch": POLICIES,
    "trackers": TRACKERS,
}  # fmt: skip


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
    loss: Annotated[SerializeAsAny[LossSection], LOSSES] = Field(default_factory=LOSSES.default_section)
    lengths: LengthsSection = LengthsSection()
    trainer: Annotated[SerializeAsAny[TrainerSection], LEARNERS] = Field(
        default_factory=LEARNERS.default_section
    )
    generator: Annotated[SerializeAsAny[GeneratorSection], ENGINES] = Field(
        default_factory=ENGINES.default_section
    )
    dispatch: Annotated[SerializeAsAny[DispatchSection], POLICIES] = Field(
        default_factory=POLICIES.default_section
    )
    evaluation: EvaluationSection = EvaluationSection()
    placement: PlacementSection = PlacementSection()
    deadlines: DeadlinesSection = DeadlinesSection()
    trackers: list[Annotated[SerializeAsAny[TrackerSection], TRACKERS]] = Field(
        [], max_length=16, description="Where the metrics of each step go besides the run's folder."
    )
    prometheus: PrometheusSection | None = Field(
        None, description="`prometheus: {}` serves the run's figures for Prometheus at /metrics."
    )
    report: FilePath = Field(
        "runs",
        description="The folder in which each run gets its report folder, as seen from the run file. By "
        "default `runs` in the folder in which the run is started.",
    )

    def with_code(self, *sections: str) -> RunSpec:
        """Return the spec with the code that these sections choose, also if it is not ours."""
        update = {name: SEAMS[name].loaded(getattr(self, name)) for name in sections}
        return self.model_copy(update=update)

    @property
    def composes_on_arrival(self) -> bool:
        """Whether the trainer takes the groups that have come, rather than those fixed at admission."""
        if self.trainer.compose == "auto":
            return self.algorithm.mode != "sync"
        return self.trainer.compose == "arrival"

    @property
    def longest_sample(self) -> int:
        """Maximum tokens of a prompt and its answer."""
        return self.sampling.max_prompt_tokens + self.sampling.max_tokens

    @property
    def generates(self) -> bool:
        """Whether the run draws samples: an offline run does only for evaluations."""
        return self.algorithm.mode != "offline" or self.evaluation.problems > 0

    def evaluates(self, version: int) -> bool:
        """Whether a version is evaluated on held-out problems."""
        if not self.evaluation.problems:
            return False
        every = self.evaluation.every
        return version in (0, self.algorithm.iterations) or (every > 0 and version % every == 0)

    def _check_loss(self) -> None:
        loss, offline = self.loss, self.algorithm.mode == "offline"
        loss.check_run(self.algorithm, self.sampling)
        if offline and not loss.holds_for_any_weights and not loss.kl and loss.correction != "none":
            raise ValueError(
                "in mode offline nothing keeps the policy near the recorded samples: set loss.kl (reference: "
                "samples), or leave loss.correction at none, so that ratios to the samples are clipped"
            )
        if self.generator.eight_bits and not (offline or loss.holds_for_any_weights or loss.correct_fresh):
            raise ValueError(
                f"generator.quantization {self.generator.eight_bits}: samples are drawn by rounded weights, "
                f"and loss {loss.kind} would take them for the trainer's own: set loss.correction: truncated "
                "and loss.correct_fresh: true, which weigh a token by how much likelier it is unrounded"
            )
        if offline and loss.most_draws:
            raise ValueError("loss.resample draws new groups, and in mode offline nothing is generated")

    def _check_engine_ranks(self) -> None:
        elsewhere = self.placement.engine_ranks.elsewhere
        if elsewhere and not self.generator.ranks_elsewhere:
            raise ValueError(
                f"placement.engine_ranks: engine {self.generator.engine} has no ranks on other machines: set "
                "elsewhere: 0"
            )
        if elsewhere and elsewhere >= self.generator.devices:
            raise ValueError(
                f"placement.engine_ranks.elsewhere ({elsewhere}) must be less than the ranks of an engine "
                f"({self.generator.devices}, tensor_parallel × pipeline_parallel), of which one is "
                "beside its generator"
            )

    @model_validator(mode="after")
    def _fits(self) -> RunSpec:
        if self.longest_sample > self.trainer.microbatch_tokens:
            raise ValueError(
                f"trainer.microbatch_tokens ({self.trainer.microbatch_tokens}) must hold the longest sample: "
                f"sampling.max_prompt_tokens + sampling.max_tokens = {self.longest_sample}"
            )
        elsewhere = self.placement.ranks.elsewhere
        if elsewhere >= self.trainer.ranks:
            raise ValueError(
                f"placement.ranks.elsewhere ({elsewhere}) must be less than trainer.ranks "
                f"({self.trainer.ranks}), which counts all of them: the trainer itself is one"
            )
        if self.generator.is_read:
            self._check_engine_ranks()
        if self.model.lora and self.trainer.is_read and not self.trainer.trains_adapters:
            raise ValueError("model.lora is for trainer.learner torch or fsdp: others can't train an adapter")
        if self.loss.is_read:
            self._check_loss()
        if self.algorithm.mode == "async" and self.trainer.keep_weights <= self.algorithm.most_stale:
            bound = "staleness" if self.algorithm.order == "window" else "staleness_cap"
            raise ValueError(
                f"trainer.keep_weights ({self.trainer.keep_weights}) must be more than algorithm.{bound} "
                f"({self.algorithm.most_stale:g}): samples are checked against the weights that made them"
            )
        if self.algorithm.order == "arrival" and self.trainer.compose == "admission":
            raise ValueError(
                "trainer.compose admission fixes at admission what is trained together, and with "
                "algorithm.order arrival that is known when groups are whole: leave compose at auto"
            )
        if self.algorithm.mode == "offline" and self.placement.balance is not None:
            raise ValueError("placement.balance is for runs that generate, and in mode offline nothing does")
        if self.evaluation.problems * (self.algorithm.iterations + 1) >= ROUND:
            raise ValueError(
                f"evaluation.problems times algorithm.iterations must be less than {ROUND}: more "
                "groups can't be numbered"
            )
        if self.task.jsonl and self.evaluation.problems and not self.task.held_out_jsonl:
            raise ValueError("evaluation.problems needs task.held_out_jsonl with a JSONL task")
        return self

"""The engine `vllm`: its settings. The engine itself is in `vllm_in_process.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from infra import choices
from producers.engines.engine import EngineSettings, FarRanksAsked, LocalEngine
from producers.engines.vllm_options import VllmOption, check_options
from schemas.rank_layout import RankLayout
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    from producers.engines.rank_group import EngineRank
    from producers.engines.vllm_in_process import GpuMemory, VllmEngine


SHARE_IN_TURNS = 0.45  # of a GPU's memory, which an engine takes that takes turns with the learner


class VllmSettings(EngineSettings):
    """Settings of the engine vllm."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        {"kv_cache_mib", "gpu_memory", "gpu_kv_cache_mib", "prefix_caching"}
    )
    records_routes: ClassVar[bool] = True
    ranks_elsewhere: ClassVar[bool] = True

    kv_cache_mib: int = Field(64, gt=0, le=16_777_216, description="MiB of KV cache of a generator on a CPU.")
    batch_invariant: bool = Field(
        True,
        description="Make a sample's bits independent of the samples that are drawn beside it (float32 on "
        "CPUs).",
    )
    gpu_memory: float | None = Field(
        None,
        gt=0,
        le=1,
        description="The share of a GPU's memory that a generator takes while it draws: weights, KV cache "
        "and what a step needs. By default as vLLM has it, and 0.45 if it takes turns with the learner "
        "(`placement.kind: colocated`), whose weights and optimizer state stay on the GPU.",
    )
    gpu_kv_cache_mib: int | None = Field(
        None,
        gt=0,
        le=16_777_216,
        description="MiB of KV cache of a generator on GPUs, of all its ranks together. By default what "
        "`gpu_memory` leaves beside the weights; with it `gpu_memory` only says how much must be free at "
        "the start. Where engines share a GPU, say it: else vLLM measures what is free while it starts, and "
        "fails if others give memory back meanwhile.",
    )
    tensor_parallel: int = Field(
        1,
        gt=0,
        le=64,
        description="Ranks of an engine: processes that hold a slice of the weights and of the KV cache "
        "each, and compute each step together. For a model that does not fit on one GPU. Each rank takes a "
        "GPU of its own, on the generator's machine unless `placement.engine_ranks` places some elsewhere; "
        "on a CPU each takes `threads`. The model's attention heads must "
        "be divisible by it. Bits differ from those of another number of ranks.",
    )
    pipeline_parallel: int = Field(
        1,
        gt=0,
        le=64,
        description="Stretches of layers that an engine divides a model into: each is held by "
        "`tensor_parallel` ranks, and a step goes through one after the other. So an engine takes "
        "tensor_parallel × pipeline_parallel GPUs, and while one stretch computes, the others wait. For "
        "models that tensor_parallel alone can't divide further. Bits are those of one stretch.",
    )
    expert_parallel: bool = Field(
        False,
        description="Give each rank of `tensor_parallel` whole experts of a mixture, an equal share of them, "
        "instead of a slice of each expert. Ranks then multiply larger matrices, and those whose experts "
        "nobody takes wait. The number of experts must be divisible by `tensor_parallel`.",
    )
    quantization: Literal["none", "int8", "fp8"] = Field(
        "none",
        description="How the engine holds the weights of linear layers. none: as `model.dtype` says. int8, "
        "fp8 (E4M3): in eight bits, with a scale for each row; half the memory of bfloat16. Activations are "
        "rounded alike, with a scale for each token, so steps are faster where there are kernels: int8 on "
        "CPUs and on GPUs up to Hopper, fp8 on GPUs from Ada on. On CPUs fp8 gains nothing. Embedding, head "
        "and norms stay as they are. Samples are drawn by rounded weights then, so `loss.correct_fresh` must "
        "be true. Not for mixtures of experts.",
    )
    prefix_caching: bool | None = Field(
        None,
        description="Compute a prompt once for all samples of it that an engine draws with the same weights, "
        "by whole blocks of the KV cache (of 16 tokens on GPUs, 128 on CPUs). By default where this changes "
        "no bits: with `batch_invariant`, on CPUs, and on GPUs with FlashAttention 3 or Triton's attention. "
        "Not for a mixture of experts whose routes are recorded (`model.follow_routes`). New weights never "
        "read what older ones computed.",
    )
    speculation: bool = Field(
        False,
        description="Guess tokens from other answers to the same prompt, and compute several of a sample in "
        "one step where measured times say that this makes more tokens a second: mostly for the last few "
        "samples. Guesses don't change what is drawn. Takes 40 MiB.",
    )

    options: dict[str, VllmOption] = Field(
        {},
        max_length=64,
        description="Further arguments of vLLM, by the names of its EngineArgs, such as `{max_num_batched_"
        "tokens: 8192}`. An argument that StreamRL sets by itself is refused.",
    )

    @field_validator("options")
    @classmethod
    def _may_be_set(cls, options: dict[str, VllmOption]) -> dict[str, VllmOption]:
        check_options(options)
        return options

    @model_validator(mode="after")
    def _has_ranks_for_experts(self) -> Self:
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "expert_parallel divides experts among the ranks of tensor_parallel, and that is 1: set "
                "generator.tensor_parallel to how many ranks there shall be"
            )
        return self

    @property
    def layout(self) -> RankLayout:
        return RankLayout(self.tensor_parallel, self.pipeline_parallel, self.expert_parallel)

    @property
    def eight_bits(self) -> str:
        return "" if self.quantization == "none" else self.quantization

    def make(self, model: str, spec: RunSpec) -> LocalEngine:
        return self._measured(model, spec, None)

    def make_with_far_ranks(self, model: str, spec: RunSpec, far: FarRanksAsked) -> LocalEngine:
        return self._measured(model, spec, far)

    def _measured(self, model: str, spec: RunSpec, far: FarRanksAsked | None) -> LocalEngine:
        from producers.engines.engine_ranks import leading_engine
        from producers.engines.measured_steps import measure_steps

        own = lambda rank: self.own_engine(model, spec, rank)  # noqa: E731
        made = own(None) if self.layout.ranks == 1 else leading_engine(own, model, spec, far)
        measure_steps(made, self.slots)
        return made

    def own_engine(self, model: str, spec: RunSpec, rank: EngineRank | None = None) -> VllmEngine:
        """Return vLLM's engine in this process; `rank`: which one of several it is."""
        from producers.engines.history_drafter import HistoryDrafter
        from producers.engines.vllm_in_process import VllmEngine
        from producers.stopping import stopping_of

        drafter = HistoryDrafter() if self.speculation else None
        return VllmEngine(
            model, dtype=spec.model.dtype, slots=self.slots, max_model_len=spec.longest_sample,
            temperature=spec.sampling.temperature,
            kv_cache_mib=self.gpu_kv_cache_mib if choices.cuda() else self.kv_cache_mib, threads=self.threads,
            batch_invariant=self.batch_invariant, stopping=stopping_of(model, spec),
            drafter=drafter, gpu=self._gpu(spec),
            options=self.options, rank=rank, routes=spec.model.follow_routes,
            eight_bits=self.eight_bits, prefix_caching=self.prefix_caching,
        )  # fmt: skip

    def _gpu(self, spec: RunSpec) -> GpuMemory:
        """Return how an engine uses its GPU's memory."""
        from producers.engines.vllm_in_process import GpuMemory

        turns = spec.placement.takes_turns
        share = self.gpu_memory or (SHARE_IN_TURNS if turns else None)
        return GpuMemory(share, turns, shared=turns or spec.placement.share_gpus)

"""The run file's section about the trainer: the keys that all learners have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.addresses import Word
from schemas.seams import Seam, SeamSection


class TrainerSection(SeamSection):
    """Settings of the trainer."""

    learner: Word = Field(
        "torch",
        description="torch: each rank holds the model and the optimizer's state. deepspeed: the ranks share "
        "them out, see zero_stage. fsdp: they share out all of it, in layers, and no rank ever holds the "
        "whole model. Or one of an installed package.",
    )
    ranks: int = Field(
        1,
        gt=0,
        le=1024,
        description="Processes that train together. Each has a GPU, or `threads` CPU threads.",
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
        "and whichever rank computed it. By default true with learners torch and fsdp, for 3 % of a "
        "step on a CPU. On a GPU it also switches on torch's deterministic algorithms, and takes 8 bytes a "
        "weight more. Learner deepspeed can't.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Compute activations again on the backward pass. That is a third more work and takes "
        "much less memory.",
    )
    offload_optimizer: bool = Field(
        False,
        description="Keep AdamW's moments in main memory: 8 bytes a weight less on a GPU. With learners "
        "torch and fsdp each parameter's come to the GPU for its step, and bits are the same. "
        "DeepSpeed steps on the CPU. On a CPU it has no effect.",
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

    @property
    def sums_exactly(self) -> bool:
        """Whether gradients are added in fixed point."""
        return bool(self.exact_sums)

    @property
    def trains_adapters(self) -> bool:
        """Whether the learner can train an adapter (model.lora)."""
        return False

    @property
    def needs_ranks(self) -> bool:
        """Whether the learner works as one of several ranks even where there is one rank alone."""
        return False

    @property
    def needs_deepspeed(self) -> bool:
        """Whether all ranks need the same version of DeepSpeed."""
        return False

    @property
    def rank_sums(self) -> list[object]:
        """The settings that a step's bits depend on, if gradients are not added in fixed point."""
        return [self.learner, self.ranks]

    @property
    def exact_recipe(self) -> object:
        """The settings that a step's bits depend on, if gradients are added in fixed point."""
        return "exact"

    @property
    def parts(self) -> int:
        """Minimum number of micro-batches of a bundle."""
        return self.least_microbatches or self.ranks


LEARNERS = Seam(
    base=TrainerSection, word="learner", key="learner", default="torch", folder="consumers.learners",
    ending="learner", first=("torch",), on_resume="bits",
)  # fmt: skip

"""The run file's sections about drawing samples and about the algorithm."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from schemas.addresses import StopString
from schemas.identity import ROUND
from schemas.section import Section

MOST_TOKENS = 10_000_000  # of one sample
MOST_OF_GROUP = 32_768  # samples: records hold their indexes in 16 bits
MOST_OF_STEP = 150_000  # samples: the record of a step, or of an evaluation, takes 40 bytes for each
_LEAST_TEMPERATURE = 0.01


class SamplingSection(Section):
    """Settings for drawing samples. No top-p or top-k: the trainer could not reproduce the logprobs."""

    temperature: float = Field(
        1.0, gt=0, le=100, description="Logits are divided by it before a token is drawn. At least 0.01."
    )
    max_tokens: int = Field(
        256, gt=0, le=MOST_TOKENS, description="Maximum tokens of an answer. A longer one ends there."
    )
    max_prompt_tokens: int = Field(
        256,
        gt=0,
        le=MOST_TOKENS,
        description="Maximum tokens of a prompt. Problems with a longer one are left out, with a warning.",
    )
    stop: list[StopString] = Field(
        [],
        max_length=16,
        description='Texts that end an answer, such as `["\\n\\n"]`. An answer ends with the token that '
        "completes one of them (its `finish` is stop). All its tokens are trained; the reward gets the text "
        "before the stop string. A special token may be named, too.",
    )
    min_tokens: int = Field(
        0,
        ge=0,
        le=MOST_TOKENS,
        description="The first so many tokens can't end an answer. The model's end tokens have no "
        "probability there, for the generator and for the trainer alike: logprobs, ratios and divergences "
        "are those of the policy that draws. A stop string that is complete by then does not count.",
    )

    @field_validator("temperature")
    @classmethod
    def _as_engines_take_it(cls, temperature: float) -> float:
        if temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"{temperature:g} is too low: vLLM raises it to {_LEAST_TEMPERATURE} by itself, and the "
                f"logprobs would not be those of the trainer. Take at least {_LEAST_TEMPERATURE}"
            )
        return temperature

    @model_validator(mode="after")
    def _least_and_most(self) -> SamplingSection:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})")
        return self


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
    order: Literal["window", "arrival"] = Field(
        "window",
        description="async: which groups an iteration trains. window: exactly the next `groups` in the order "
        "in which they were admitted; a long answer holds up its iteration. arrival: the first `groups` that "
        "are whole; long answers are trained later, and `staleness_cap` bounds how much later.",
    )
    staleness_cap: int | None = Field(
        None,
        ge=0,
        le=128,
        description="order arrival: how many iterations old the weights may be that draw a sample, without "
        "exception: a group that would become older is waited for. `staleness` then bounds the mean. Where "
        "both are equal, the order is that of window. Default: twice `staleness`, rounded up, and 2 more.",
    )
    iterations: int = Field(
        100, gt=0, le=100_000_000, description="Iterations of the whole run. A resumed run may have more."
    )
    groups: int = Field(
        32, gt=0, le=1_000_000, description="Groups of an iteration. Each group has one prompt."
    )
    group_size: int = Field(
        8,
        ge=2,
        le=MOST_OF_GROUP,
        description="Samples of a group. Their mean reward is the baseline of each.",
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
            sync = "sync is on-policy, its staleness is 0"
            why = sync if self.mode == "sync" else "in mode offline nothing is generated"
            raise ValueError(f"staleness {self.staleness:g} needs mode async; {why}")
        if self.order == "arrival" and self.mode != "async":
            raise ValueError(f"order arrival needs mode async; in mode {self.mode} each iteration is one lot")
        if self.staleness_cap is not None and self.order != "arrival":
            raise ValueError("staleness_cap is for order arrival; with order window `staleness` is the cap")
        if self.staleness_cap is not None and self.staleness_cap < self.staleness:
            raise ValueError(
                f"staleness_cap ({self.staleness_cap}) must be at least staleness ({self.staleness:g}), "
                "which bounds the mean"
            )
        if (self.mode == "offline") != (self.recorded is not None):
            raise ValueError(
                "mode offline needs `recorded`: the id of the run whose samples are trained"
                if self.recorded is None
                else f"recorded is for mode offline; the mode is {self.mode}"
            )
        if self.iterations * self.groups >= ROUND:
            raise ValueError(
                f"iterations times groups must be less than {ROUND}: more groups can't be numbered"
            )
        if self.groups % self.optimizer_steps:
            raise ValueError(
                f"groups ({self.groups}) must be a multiple of optimizer_steps ({self.optimizer_steps})"
            )
        if (samples := self.groups * self.group_size // self.optimizer_steps) > MOST_OF_STEP:
            raise ValueError(
                f"algorithm.groups times group_size is {samples} samples for each of optimizer_steps; the "
                f"record of a step holds {MOST_OF_STEP}"
            )
        return self

    @property
    def lookahead(self) -> float:
        """How many iterations generation may run ahead of training."""
        return {"sync": 0.0, "async": self.staleness, "offline": math.inf}[self.mode]

    @property
    def most_stale(self) -> float:
        """How many iterations older than the trained weights those may be that drew a sample."""
        if self.order == "window":
            return math.ceil(self.lookahead) if math.isfinite(self.lookahead) else math.inf
        if self.staleness_cap is not None:
            return self.staleness_cap
        return math.ceil(2 * self.staleness) + 2

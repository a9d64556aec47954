"""The run file's section about the loss: the keys that all losses have, and those that several have.

Each loss takes only keys of its own besides. Clips and averages are by default those of its paper; keys that
cost samples or time (dapo's resample and overlong_tokens, a reference) are off by default.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.addresses import FilePath, Word
from schemas.algorithm import AlgorithmSection, SamplingSection
from schemas.seams import Seam, SeamSection

SAMPLES = "samples"  # as reference: the weights that drew each token
Average = Literal["token", "sqrt", "sequence", "longest", "sample"]


def average(default: Average) -> Any:
    """Return the field of the weight of a token."""
    return Field(
        default,
        description="The weight of a token. token: all count alike. sequence: 1/length of its sample, so "
        "that samples count alike. sqrt: 1/sqrt(length). longest: all count alike, and a step "
        "divides by samples times sampling.max_tokens. sample: all count alike, and a step "
        "divides by samples.",
    )


def clip_low(default: float) -> Any:
    """Return the field of the lower clip of ratios."""
    return Field(
        default,
        gt=0,
        lt=1,
        description="The ratio of new to old probability is clipped below 1 - clip_low.",
    )


def clip_high(default: float, description: str = "") -> Any:
    """Return the field of the upper clip of ratios."""
    ratio = "The ratio of new to old probability is clipped above 1 + clip_high."
    return Field(default, gt=0, le=1000, description=description or ratio)


class LossSection(SeamSection):
    """The loss that is minimised. Settings that a loss does not have are errors."""

    kind: Word = Field(
        "grpo",
        description="The loss: grpo, dr_grpo, dapo, rloo, reinforce_pp (REINFORCE++), ppo (with a critic "
        "and GAE), cispo, gspo or tb (trajectory balance), or one of an installed package.",
    )
    average: Average = average("token")
    kl: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="Weight of the divergence from the reference policy. 0: there is no reference.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="The place where the divergence counts: in the loss of each token, or in the rewards.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="The estimate of the divergence from a token's r = log policy - log reference. By "
        "default k3 in the loss and k1 in rewards. k1: r, exact on average; in the loss its "
        "gradient is 0 on average, so it is for rewards. k2: r^2 / 2, whose gradient is that of "
        "the divergence on the policy's own samples. k3: exp(-r) - 1 + r, exact on average and "
        "never negative.",
    )
    reference: FilePath | None = Field(
        None,
        description="A folder with the reference policy. By default the model that the run begins with. "
        "`samples`: the weights that drew each token, so that the policy stays near the data.",
    )
    correction: Literal["none", "truncated", "decoupled"] = Field(
        "none",
        description="The correction for samples that were drawn by other weights than those at the "
        "iteration's begin. none: ratios are taken to the weights that drew a token, as the "
        "generator said them. truncated (truncated importance sampling) and decoupled: ratios, "
        "and their clip, are taken to the iteration's first weights as the trainer computes "
        "them, and a token is weighted by how much likelier these make it than the weights that "
        "drew it. rloo has no ratio: truncated weights a token by how much likelier it is now.",
    )
    correction_cap: float = Field(
        2.0,
        gt=0,
        le=1e6,
        description="Maximum of that weight, a factor. A lower one stays nearer to the data, and is more "
        "biased.",
    )
    correct_fresh: bool = Field(
        False,
        description="Weight also the samples that the iteration's first weights alone drew. Generator and "
        "trainer compute their logprobs differently, by up to .13 in bfloat16. false: their "
        "tokens weigh 1.",
    )

    @model_validator(mode="before")
    @classmethod
    def _said(cls, data: Any) -> Any:
        """Take null as not said: records of old runs say it of the settings that a loss does not have."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}

    @model_validator(mode="after")
    def _fits(self) -> LossSection:
        for key in ("resample", "replay"):  # other processes read them where the loss's code is not loaded
            value = getattr(self, key, 0)
            if not isinstance(value, int | float) or not 0 <= value <= 64:
                raise ValueError(f"{key} must be a number from 0 to 64, not {value!r:.100}")
        if not self.is_read:
            return self
        if self.correct_fresh and self.correction == "none":
            raise ValueError("correct_fresh needs a correction: truncated or decoupled")
        if self.kl_estimator is not None and not self.kl:
            raise ValueError("a kl_estimator is of no use while kl is 0")
        if self.reference is not None and not (self.kl or self.always_needs_reference):
            raise ValueError("a reference is of no use while kl is 0")
        if self.reference == SAMPLES and (self.always_needs_reference or self.kl_in == "reward"):
            raise ValueError("the reference `samples` is for divergence in the loss (kl_in: loss)")
        return self

    def check_run(self, algorithm: AlgorithmSection, sampling: SamplingSection) -> None:
        """Raise ValueError if the loss does not fit the run's other settings."""

    @property
    def has_ratios(self) -> bool:
        """Whether the loss compares the probability of a token now and before."""
        return True

    @property
    def always_needs_reference(self) -> bool:
        """Whether the loss needs a reference also while kl is 0."""
        return False

    @property
    def holds_for_any_weights(self) -> bool:
        """Whether the loss is right whichever weights drew the samples."""
        return False

    @property
    def most_draws(self) -> int:
        """How many times another problem may be drawn in the place of a group that told nothing."""
        return int(getattr(self, "resample", 0))

    @property
    def old_groups(self) -> float:
        """How many groups of earlier steps are trained again for each new group."""
        return float(getattr(self, "replay", 0.0))

    @property
    def anchors_at_start(self) -> bool:
        """Whether ratios are taken to the weights that an iteration begins with."""
        return self.correction == "decoupled" or (self.correction == "truncated" and self.has_ratios)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference must be computed: one is used, and not the weights that drew the samples."""
        return (self.kl > 0 or self.always_needs_reference) and self.reference != SAMPLES


LOSSES = Seam(
    base=LossSection, word="loss", key="kind", default="grpo", folder="consumers.losses", ending="loss",
    first=("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "cispo", "gspo"),
)  # fmt: skip

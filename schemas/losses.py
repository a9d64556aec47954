"""The run file's section about the loss: which one, and its settings.

Each loss takes only settings of its own. Clips and averages are by default those of its paper; settings that
cost samples or time (dapo's resample and overlong_tokens, a reference) are off by default.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.addresses import FilePath
from schemas.section import Section

# By loss: its own settings, and their defaults.
OWN: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "std", "average": "sequence", "clip_low": 0.2, "clip_high": 0.2},
    "dr_grpo": {"average": "longest", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {
        "average": "token", "clip_low": 0.2, "clip_high": 0.28, "overlong_tokens": 0, "overlong_penalty": 1.0,
        "resample": 0,
    },
    "rloo": {"average": "sample"},
    "reinforce_pp": {"advantage": "plain", "average": "token", "clip_low": 0.2, "clip_high": 0.2},
    "ppo": {
        "average": "token", "clip_low": 0.2, "clip_high": 0.2, "discount": 1.0, "gae_lambda": 0.95,
        "value_clip": 0.2, "value_learning_rate": 1e-5, "whiten": True,
    },
    "cispo": {"advantage": "std", "average": "token", "clip_high": 4.0},
    "gspo": {"advantage": "std", "average": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "tb": {"average": "sample", "reward_temperature": 0.05, "replay": 0.0},
}  # fmt: skip
SAMPLES = "samples"  # as reference: the weights that drew each token
_OF_ALL = {
    "kind", "kl", "kl_in", "kl_estimator", "reference", "correction", "correction_cap", "correct_fresh",
}  # fmt: skip


class LossSection(Section):
    """The loss that is minimised. Settings that a loss does not have are errors."""

    kind: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "cispo", "gspo", "tb"] = Field(
        "grpo",
        description="The loss: grpo, dr_grpo, dapo, rloo, reinforce_pp (REINFORCE++), ppo (with a critic "
        "and GAE), cispo, gspo or tb (trajectory balance).",
    )
    advantage: Literal["mean", "std", "plain"] | None = Field(
        None,
        description="grpo, cispo, gspo: mean is the reward minus the group's mean; std divides that by the "
        "group's deviation. reinforce_pp: plain or mean, divided by the deviation in the whole "
        "step.",
    )
    average: Literal["token", "sqrt", "sequence", "longest", "sample"] | None = Field(
        None,
        description="The weight of a token. token: all count alike. sequence: 1/length of its sample, so "
        "that samples count alike. sqrt: 1/sqrt(length). longest: all count alike, and a step "
        "divides by samples times sampling.max_tokens. sample: all count alike, and a step "
        "divides by samples.",
    )
    clip_low: float | None = Field(
        None, gt=0, lt=1, description="The ratio of new to old probability is clipped below 1 - clip_low."
    )
    clip_high: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="The ratio of new to old probability is clipped above 1 + clip_high. cispo: its weight "
        "is.",
    )
    overlong_tokens: int | None = Field(
        None,
        ge=0,
        le=10_000_000,
        description="dapo: number of tokens before sampling.max_tokens over which an answer loses reward. "
        "0: none.",
    )
    overlong_penalty: float | None = Field(
        None, gt=0, le=1e6, description="dapo: the reward that an answer of sampling.max_tokens loses."
    )
    resample: int | None = Field(
        None,
        ge=0,
        le=64,
        description="dapo: number of times that another problem may be drawn in the place of a group whose "
        "rewards are all alike. Groups that told nothing then do not count in the average. 0: "
        "none is drawn, and they count.",
    )
    discount: float | None = Field(None, gt=0, le=1, description="ppo: the discount of rewards, a token.")
    gae_lambda: float | None = Field(
        None,
        ge=0,
        le=1,
        description="ppo: the lambda of GAE. 1: returns are the rewards that came; 0: the critic's word for "
        "the next token.",
    )
    value_clip: float | None = Field(
        None, gt=0, le=1e6, description="ppo: maximum change of the critic's value in a step."
    )
    value_learning_rate: float | None = Field(
        None, gt=0, le=10, description="ppo: the critic's learning rate."
    )
    whiten: bool | None = Field(
        None,
        description="ppo: give advantages mean 0 and deviation 1 over all tokens of a step, so that a "
        "step's size does not follow the rewards' scale. A step is then computed when its last "
        "sample is there. false: advantages stay as the critic leaves them, and samples are "
        "trained as they come.",
    )
    reward_temperature: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="tb: the policy that is sought is reference * exp(reward / reward_temperature). A "
        "higher value stays nearer to the reference.",
    )
    replay: float | None = Field(
        None,
        ge=0,
        le=64,
        description="tb: number of groups of earlier steps that are trained again for each new group.",
    )
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
    def _own(cls, data: Any) -> Any:
        """Refuse settings that the loss does not have, and fill in the defaults of its own."""
        if isinstance(data, str):
            data = {"kind": data}
        if not isinstance(data, dict):
            return data
        kind = data.get("kind", "grpo")
        own = OWN.get(kind) if isinstance(kind, str) else None
        if own is None:
            return data  # the kind's own error says more
        foreign = [key for key in data if key in cls.model_fields and key not in own and key not in _OF_ALL]
        foreign = [key for key in foreign if data[key] is not None]
        if foreign:
            raise ValueError(f"{kind} has no {' and no '.join(foreign)}; it has {', '.join(own)}")
        return {**own, **{key: value for key, value in data.items() if value is not None}}

    @model_validator(mode="after")
    def _fits(self) -> LossSection:
        if self.kind == "tb" and self.correction != "none":
            raise ValueError("tb holds for samples of any weights: its correction is none")
        if self.advantage == ("std" if self.kind == "reinforce_pp" else "plain"):
            raise ValueError(f"{self.kind} has no advantage {self.advantage}")
        if self.correct_fresh and self.correction == "none":
            raise ValueError("correct_fresh needs a correction: truncated or decoupled")
        if self.kl_estimator is not None and not self.kl:
            raise ValueError("a kl_estimator is of no use while kl is 0")
        if self.reference is not None and not (self.kl or self.kind == "tb"):
            raise ValueError("a reference is of no use while kl is 0")
        if self.kind == "tb" and self.kl and self.kl_in == "reward":
            raise ValueError("tb counts the divergence by reward_temperature already: set kl to 0")
        if self.kind == "rloo" and self.correction == "decoupled":
            raise ValueError("rloo has no ratio to an iteration's first weights: its correction is truncated")
        if self.reference == SAMPLES and (self.kind == "tb" or self.kl_in == "reward"):
            raise ValueError("the reference `samples` is for divergence in the loss (kl_in: loss)")
        return self

    @property
    def anchors_at_start(self) -> bool:
        """Whether ratios are taken to the weights that an iteration begins with."""
        return self.correction == "decoupled" or (self.correction == "truncated" and self.kind != "rloo")

    @property
    def needs_reference(self) -> bool:
        """Whether a reference must be computed: one is used, and not the weights that drew the samples."""
        return (self.kl > 0 or self.kind == "tb") and self.reference != SAMPLES

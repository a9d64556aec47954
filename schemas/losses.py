"""The run file's section about the loss: which one, and what can be set about it.

Each loss takes only the settings that are its own; clips and averages that are left out are as its paper has
them, and what costs samples (dapo's resample and overlong_tokens, a reference) is off.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.addresses import FilePath
from schemas.section import Section

# By loss: what is its own, and what holds if nothing is said.
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
    """What is minimised. Settings that a loss does not have are errors."""

    kind: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "cispo", "gspo", "tb"] = Field(
        "grpo",
        description="grpo, dr_grpo, dapo, rloo, reinforce_pp (REINFORCE++), ppo (with a critic and GAE), "
        "cispo, gspo, tb (trajectory balance).",
    )
    advantage: Literal["mean", "std", "plain"] | None = Field(
        None,
        description="grpo, cispo, gspo: mean: reward minus the group's mean. std: that, over the group's "
        "deviation. reinforce_pp: plain or mean, over the deviation in the whole step.",
    )
    average: Literal["token", "sqrt", "sequence", "longest", "sample"] | None = Field(
        None,
        description="How tokens count. token: all alike. sequence: 1/length of their sample, so that samples "
        "count alike. sqrt: 1/sqrt(length). longest: alike, and a step divides by samples times "
        "sampling.max_tokens. sample: alike, and a step divides by samples.",
    )
    clip_low: float | None = Field(None, gt=0, lt=1, description="The ratio is clipped below 1 - clip_low.")
    clip_high: float | None = Field(
        None, gt=0, le=1000, description="The ratio is clipped above 1 + clip_high; cispo: its weight is."
    )
    overlong_tokens: int | None = Field(
        None,
        ge=0,
        le=10_000_000,
        description="dapo: answers lose reward over the last so many tokens before max_tokens.",
    )
    overlong_penalty: float | None = Field(None, gt=0, le=1e6, description="dapo: how much, at max_tokens.")
    resample: int | None = Field(
        None,
        ge=0,
        le=64,
        description="dapo: where a group's rewards are all alike, another problem is drawn in its place, "
        "at most so often, and groups that tell nothing do not count in the average. 0: they count.",
    )
    discount: float | None = Field(None, gt=0, le=1, description="ppo: of rewards, a token.")
    gae_lambda: float | None = Field(
        None, ge=0, le=1, description="ppo: 1: returns are what came; 0: what the critic says of the next."
    )
    value_clip: float | None = Field(
        None, gt=0, le=1e6, description="ppo: the critic moves by at most so much in a step."
    )
    value_learning_rate: float | None = Field(None, gt=0, le=10, description="ppo: of the critic.")
    whiten: bool | None = Field(
        None,
        description="ppo: advantages have mean 0 and deviation 1 over all tokens of a step, so that its size "
        "does not follow the rewards' scale. Then a step is computed when its last sample is there; "
        "false: advantages are as the critic leaves them, and samples are trained as they come.",
    )
    reward_temperature: float | None = Field(
        None, gt=0, le=1e6, description="tb: the reference's share of the policy that is sought, "
        "reference * exp(reward / reward_temperature)."
    )  # fmt: skip
    replay: float | None = Field(
        None,
        ge=0,
        le=64,
        description="tb: for each new group, so many of earlier steps are trained again.",
    )
    kl: float = Field(0.0, ge=0, le=1e6, description="Weight of the divergence from the reference policy.")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="Where it counts: in the loss of each token, or in the rewards."
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="How it is estimated from a token's r = log policy - log reference; k3 in the loss and "
        "k1 in rewards, if nothing is said. k1: r, exact on average; in the loss its gradient is 0 on "
        "average, so it is for rewards. k2: r^2 / 2, whose gradient is that of the divergence of what the "
        "policy draws. k3: exp(-r) - 1 + r, exact on average and never negative.",
    )
    reference: FilePath | None = Field(
        None,
        description="Folder of the reference policy; by default the model that the run begins with. "
        "`samples`: the weights that drew each token, so that the policy stays near what the data did.",
    )
    correction: Literal["none", "truncated", "decoupled"] = Field(
        "none",
        description="What is done about samples that other weights drew than those that the iteration began "
        "with. none: ratios are taken to the weights that drew a token, as the generator said them. "
        "truncated (truncated importance sampling) and decoupled: ratios, and what clips them, are taken to "
        "the weights that the iteration began with, as the trainer computes them, and a token is weighted by "
        "how much likelier those make it than what drew it. rloo has no ratio: truncated weights a token by "
        "how much likelier it is now.",
    )
    correction_cap: float = Field(
        2.0,
        gt=0,
        le=1e6,
        description="The largest such weight, a factor; a lower one is nearer to the data, and biased.",
    )
    correct_fresh: bool = Field(
        False,
        description="Weight also tokens that the iteration's first weights drew: what differs there is only "
        "how generator and trainer compute, up to .13 a logprob in bfloat16. false: such tokens weigh 1.",
    )

    @model_validator(mode="before")
    @classmethod
    def _own(cls, data: Any) -> Any:
        """Refuse what the loss does not have, and fill in what it has."""
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
        """Whether there is a reference policy, and it is not that of the samples."""
        return (self.kl > 0 or self.kind == "tb") and self.reference != SAMPLES

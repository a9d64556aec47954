"""The dispatch policy `deadline`: its settings. The policy itself is in `producers.dispatch.deadline`."""

from __future__ import annotations

from pydantic import Field

from producers.dispatch.beliefs import Beliefs
from producers.dispatch.choosers import InThread
from producers.dispatch.deadline import DeadlinePolicy, MovesWhere
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.policies.longest_first_policy import LongestFirst
from producers.dispatch.policies.policy import PolicySettings
from producers.dispatch.warm import WarmUp
from schemas.runspec import RunSpec

_REPLANS = 8  # choices during one makespan
_THRIFT = 0.02  # of its jobs' expected time that a choice may take


class DeadlineSettings(PolicySettings):
    """Settings of deadline."""

    prefill_tokens_per_s: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="Tokens a second that a generator prefills, which is what it costs to move a running "
        "sample. Without it, a token is taken to cost as much as in a decode step of a full batch: that is "
        "more than it does.",
    )
    moves: MovesWhere = Field(
        "exact",
        description="Where a running sample may move to a generator on which it ends sooner, which computes "
        "its tokens again. exact: where that changes no bit of the sample, as the engines say (vLLM on "
        "CPUs, and on GPUs with FlashAttention 3 or Triton's attention, with "
        "`generator.batch_invariant`). always: everywhere. never: nowhere.",
    )

    def make(self, spec: RunSpec) -> DeadlinePolicy | LongestFirst:
        """Return the policy. In async mode it is longest first.

        A deadline makes one iteration alone end early. In a stream that leaves slots empty which the next
        iteration's samples would fill (`python -m tests.bench streams`).
        """
        if spec.algorithm.mode == "async":
            return LongestFirst()
        speed = self.prefill_tokens_per_s
        return DeadlinePolicy(
            GroupBeliefs(Beliefs(spec.sampling.max_tokens)), seed=spec.seed, replans=_REPLANS,
            thrift=_THRIFT, moves=self.moves, prefill_s=None if speed is None else 1 / speed, warm=WarmUp(),
            chooser=InThread(),
        )  # fmt: skip

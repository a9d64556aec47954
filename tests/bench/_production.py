"""The dispatch policy of a run that says nothing of dispatch."""

from __future__ import annotations

from typing import Any

from producers.dispatch.beliefs import Beliefs
from producers.dispatch.deadline import DeadlinePolicy
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.policies.policy import policy_of
from producers.dispatch.warm import choose_once
from schemas.runspec import RunSpec
from tests.bench._workloads import BUDGET, Workload
from tests.factories import make_spec


def spec_of(**sections: Any) -> RunSpec:
    """A run file whose longest answers are well above all lengths that come."""
    budget = {"max_tokens": BUDGET, "max_prompt_tokens": 8}
    return make_spec(sampling=budget, trainer={"microbatch_tokens": 2 * BUDGET}, **sections)


def learned_of(before: Workload | None, *, exact: bool = False) -> GroupBeliefs:
    """What a run has learned: of the samples before, and of no other."""
    learned = Beliefs(BUDGET)
    if before is not None:
        learned.observe(before.pairs(exact=exact))
    return GroupBeliefs(learned)


def production(group_beliefs: GroupBeliefs, seed: int) -> DeadlinePolicy:
    """The policy, compiled as it is in a run while engines start."""
    policy = policy_of(spec_of(seed=seed))
    assert isinstance(policy, DeadlinePolicy)
    policy.group_beliefs = group_beliefs
    choose_once()  # compiles it here: a thread beside a busy machine may take long
    policy.warm = lambda: True
    return policy

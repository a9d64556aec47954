"""Each loss on a problem whose optimum is known: one prompt, and six answers of one token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from consumers.batches.micro_batches import plan
from consumers.batches.training_rows import Scores, TrainingRow
from consumers.learners.critic import value_loss
from consumers.losses.loss import loss_of
from consumers.losses.objective import objective
from tests.factories import make_sample, make_spec

REWARDS = np.array([0.0, 0.1, 0.2, 0.6, 0.8, 1.0])
GROUPS, SIZE = 8, 8


def learned(
    section: dict[str, Any], *, steps: int, rate: float, behaviour: np.ndarray | None = None
) -> np.ndarray:
    """The policy after so many steps, as a mean over the last half; `behaviour`: who draws, if not itself."""
    spec = make_spec(loss=section, algorithm={"groups": GROUPS, "group_size": SIZE})
    loss, draw = loss_of(spec), np.random.default_rng(1)
    logits = torch.zeros(len(REWARDS), dtype=torch.float64, requires_grad=True)
    critic = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([logits, critic], lr=rate)
    found = np.zeros(len(REWARDS))
    for step in range(steps):
        now = logits.detach().log_softmax(-1).numpy()
        drawn_by = np.log(behaviour) if behaviour is not None else now
        rows = []
        for number, token in enumerate(draw.choice(len(REWARDS), GROUPS * SIZE, p=np.exp(drawn_by))):
            sample = make_sample(
                spec, number // SIZE, number % SIZE, reward=REWARDS[token], length=1,
                versions=np.array([-1 if behaviour is not None else 0], np.int32),
                tokens=np.array([token], np.int32), logprobs=drawn_by[[token]].astype(np.float32),
            )  # fmt: skip
            uniform = np.full(1, -np.log(len(REWARDS)))
            rows.append(
                TrainingRow(sample, 0, number, Scores(uniform, now[[token]], np.array([critic.item()])))
            )
        for batch in plan(rows, loss, 64, 0).batches:
            tokens = torch.tensor([int(row.sample.tokens[0]) for row in batch.rows])
            total, _ = objective(logits.log_softmax(-1)[tokens], batch, loss)
            if loss.critic:
                assert batch.values is not None and batch.returns is not None
                total = total + value_loss(critic.expand(len(tokens)), batch.values, batch.returns, 1.0).sum()
            (total / loss.total([row.sample for row in rows])).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= steps // 2:
            found += np.exp(now) / (steps - steps // 2)
    return found


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "grpo"}, {"kind": "dr_grpo"}, {"kind": "dapo"}, {"kind": "rloo"}, {"kind": "reinforce_pp"},
        {"kind": "reinforce_pp", "advantage": "mean"}, {"kind": "ppo"}, {"kind": "cispo"},
        {"kind": "gspo", "clip_high": 0.2, "clip_low": 0.2},
        {"kind": "grpo", "correction": "truncated"},
    ],
    ids=lambda section: "-".join(map(str, section.values())),
)  # fmt: skip
def test_the_best_answer_wins(section: dict[str, Any]) -> None:
    policy = learned(section, steps=80, rate=0.2)
    assert policy[-1] > 0.85, policy


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Total variation."""
    return float(np.abs(one - other).sum() / 2)


def test_trajectory_balance_finds_the_tempered_policy_from_anyones_samples() -> None:
    expected = np.exp(REWARDS / 0.4) / np.exp(REWARDS / 0.4).sum()
    others = np.array([0.3, 0.3, 0.1, 0.1, 0.1, 0.1])
    found = learned({"kind": "tb", "reward_temperature": 0.4}, steps=150, rate=0.05, behaviour=others)
    assert apart(found, expected) < 0.02, (found, expected)


def test_divergence_in_the_reward_is_paid_as_the_formula_says() -> None:
    """max E r - b KL(policy | uniform): policy ~ exp(r / b)."""
    expected = np.exp(REWARDS / 0.4) / np.exp(REWARDS / 0.4).sum()
    found = learned({"kind": "rloo", "kl": 0.4, "kl_in": "reward"}, steps=150, rate=0.05)
    assert apart(found, expected) < 0.03, (found, expected)


def test_divergence_in_the_loss_is_paid_as_its_estimator_does() -> None:
    """The gradient of k3 on samples is that of KL(uniform | policy): policy = b * uniform / (c - r).

    A sample is part of its group's mean, so rewards count (n - 1) / n.
    """
    share = 0.4 * SIZE / (SIZE - 1) / len(REWARDS)
    low, high = REWARDS.max() + 1e-9, REWARDS.max() + 10
    for _ in range(80):
        middle = (low + high) / 2
        too_much = (share / (middle - REWARDS)).sum() > 1
        low, high = (middle, high) if too_much else (low, middle)
    expected = share / (low - REWARDS)
    found = learned({"kind": "dr_grpo", "average": "token", "kl": 0.4}, steps=150, rate=0.05)
    assert apart(found, expected) < 0.03, (found, expected)


def test_corrected_samples_of_others_lead_to_the_same_optimum() -> None:
    """Drawn mostly from bad answers: without a correction the clip ends it long before."""
    others = np.array([0.3, 0.3, 0.2, 0.1, 0.07, 0.03])
    corrected = {"kind": "dr_grpo", "correction": "truncated", "correction_cap": 100.0}
    assert learned(corrected, steps=80, rate=0.2, behaviour=others)[-1] > 0.85
    assert learned({"kind": "dr_grpo"}, steps=80, rate=0.2, behaviour=others)[-1] < 0.5

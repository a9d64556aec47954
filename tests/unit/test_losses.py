"""Each loss against its formula, written down here sample by sample; and what the corrections do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from consumers.batches.micro_batches import plan
from consumers.batches.training_rows import Scores, TrainingRow
from consumers.learners.critic import value_loss
from consumers.losses.loss import loss_of
from consumers.losses.objective import objective
from consumers.steps.redo import version_trained
from schemas.runspec import RunSpec
from tests.factories import make_sample, make_spec

VOCABULARY = 24
GROUPS, SIZE = 3, 4


def spec_of(loss: dict[str, Any], **sections: Any) -> RunSpec:
    return make_spec(loss=loss, algorithm={"groups": GROUPS, "group_size": SIZE}, **sections)


def rows_of(spec: RunSpec, **fields: Any) -> list[TrainingRow]:
    """A step's rows, each with what a reference, earlier weights and a critic might say."""
    rows = []
    for number, (group, index) in enumerate(itertools.product(range(GROUPS), range(SIZE))):
        sample = make_sample(spec, group, index, **fields)
        draw = np.random.default_rng([9, group, index])
        size = sample.true_length
        scores = Scores(-draw.random(size), -draw.random(size), draw.normal(size=size))
        rows.append(TrainingRow(sample, 0, number, scores))
    return rows


def logprobs_of(rows: Sequence[TrainingRow], table: torch.Tensor) -> list[torch.Tensor]:
    """A policy as simple as can be: a token's logprob depends on the token before."""
    found = []
    for row in rows:
        tokens = torch.tensor([*row.sample.prompt_tokens, *row.sample.tokens], dtype=torch.long)
        first = row.sample.prompt_tokens.size
        logits = table[tokens[first - 1 : -1]]
        found.append(logits.log_softmax(-1).gather(1, tokens[first:, None])[:, 0])
    return found


def ours(spec: RunSpec, rows: Sequence[TrainingRow], budget: int = 64, version: int = 0) -> torch.Tensor:
    """The gradient of a step as the trainer computes it, with the policy above."""
    loss, table = loss_of(spec), table_of()
    rows = list(rows)
    for batch in plan(rows, loss, budget, version).batches:
        total, _ = objective(torch.cat(logprobs_of(batch.rows, table)), batch, loss)
        total.backward()
    assert table.grad is not None
    return table.grad / loss.total([row.sample for row in rows])


def table_of() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, requires_grad=True)


Group = Sequence[tuple[TrainingRow, torch.Tensor]]


def written_down(
    rows: Sequence[TrainingRow], of_groups: Callable[[list[Group]], torch.Tensor]
) -> torch.Tensor:
    """The gradient of a formula over groups of (row, logprobs)."""
    table = table_of()
    pairs = list(zip(rows, logprobs_of(rows, table), strict=True))
    of_groups([pairs[start : start + SIZE] for start in range(0, len(pairs), SIZE)]).backward()
    assert table.grad is not None
    return table.grad


def behaviour(row: TrainingRow) -> torch.Tensor:
    return torch.from_numpy(row.sample.logprobs.astype(np.float64))


def rewards_of(group: Group) -> np.ndarray:
    return np.array([row.sample.reward for row, _ in group])


def clip(ratio: torch.Tensor, advantage: Any, low: float, high: float) -> torch.Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def grpo(groups: list[Group]) -> torch.Tensor:
    """1/G sum_i 1/|o_i| sum_t of the clipped gain, over groups, with (r - mean) / std."""
    losses = []
    for group in groups:
        rewards = rewards_of(group)
        for (row, now), reward in zip(group, rewards, strict=True):
            advantage = (reward - rewards.mean()) / (rewards.std() + 1e-4)
            losses.append(clip((now - behaviour(row)).exp(), advantage, 0.2, 0.2).mean())
    return torch.stack(losses).mean()


def grpo_kl(groups: list[Group]) -> torch.Tensor:
    """With 0.1 times the divergence from the reference in the loss, by the k3 estimator."""
    extra = []
    for row, now in itertools.chain(*groups):
        less = torch.from_numpy(row.scores.reference) - now  # type: ignore[arg-type]
        extra.append(0.1 * (less.exp() - less - 1).mean())
    return grpo(groups) + torch.stack(extra).mean()


def grpo_near_data(groups: list[Group]) -> torch.Tensor:
    """The same, from the weights that drew each token."""
    extra = []
    for row, now in itertools.chain(*groups):
        less = behaviour(row) - now
        extra.append(0.1 * (less.exp() - less - 1).mean())
    return grpo(groups) + torch.stack(extra).mean()


def dr_grpo(groups: list[Group]) -> torch.Tensor:
    """No deviation, and every token over the longest possible length."""
    losses = []
    for group in groups:
        rewards = rewards_of(group)
        for (row, now), reward in zip(group, rewards, strict=True):
            losses.append(clip((now - behaviour(row)).exp(), reward - rewards.mean(), 0.2, 0.2).sum() / 16)
    return torch.stack(losses).mean()


def dapo(groups: list[Group]) -> torch.Tensor:
    """Token level, clip higher, and a reward that falls over the last 6 tokens before 16."""
    losses = []
    for group in groups:
        lengths = np.array([row.sample.true_length for row, _ in group])
        punished = np.where(lengths <= 10, 0.0, np.where(lengths <= 16, (10 - lengths) / 6, -1.0))
        rewards = rewards_of(group) + 0.5 * punished
        for (row, now), reward in zip(group, rewards, strict=True):
            advantage = (reward - rewards.mean()) / (rewards.std() + 1e-4)
            losses.append(clip((now - behaviour(row)).exp(), advantage, 0.2, 0.28))
    return torch.cat(losses).mean()


def rloo(groups: list[Group]) -> torch.Tensor:
    """REINFORCE against the mean of the others; the divergence is taken off the reward."""
    losses = []
    for group in groups:
        paid = [0.1 * (row.sample.logprobs - row.scores.reference).sum() for row, _ in group]
        rewards = rewards_of(group) - np.array(paid)
        for place, (_, now) in enumerate(group):
            others = np.delete(rewards, place).mean()
            losses.append(-(rewards[place] - others) * now.sum())
    return torch.stack(losses).mean()


def reinforce_pp(groups: list[Group]) -> torch.Tensor:
    """Each token: the reward less what diverges from it on; normalised over the step; clipped."""
    worth = []
    for row, _ in itertools.chain(*groups):
        apart = row.sample.logprobs.astype(np.float64) - row.scores.reference
        worth.append([row.sample.reward - 0.1 * apart[place:].sum() for place in range(len(apart))])
    every = np.concatenate(worth)
    losses = []
    for (row, now), mine in zip(itertools.chain(*groups), worth, strict=True):
        advantage = torch.tensor((np.array(mine) - every.mean()) / every.std())
        losses.append(clip((now - behaviour(row)).exp(), advantage, 0.2, 0.2))
    return torch.cat(losses).mean()


def gae(groups: list[Group]) -> list[np.ndarray]:
    """Written as its sum: A_t = sum over l of (discount * lambda)^l * delta_{t+l}."""
    found = []
    for row, _ in itertools.chain(*groups):
        values = np.append(row.scores.values, 0.0)  # type: ignore[arg-type]
        count = len(values) - 1
        rewards = np.append(np.zeros(count - 1), row.sample.reward)
        delta = [rewards[t] + 0.9 * values[t + 1] - values[t] for t in range(count)]
        advantage = [sum((0.9 * 0.8) ** (s - t) * delta[s] for s in range(t, count)) for t in range(count)]
        found.append(np.array(advantage))
    return found


def ppo(groups: list[Group]) -> torch.Tensor:
    """PPO's clip."""
    losses = []
    for (row, now), advantage in zip(itertools.chain(*groups), gae(groups), strict=True):
        losses.append(clip((now - behaviour(row)).exp(), torch.tensor(advantage), 0.2, 0.2))
    return torch.cat(losses).mean()


def ppo_whitened(groups: list[Group]) -> torch.Tensor:
    """Advantages less their mean over the step's tokens, over their deviation."""
    every = np.concatenate(gae(groups))
    losses = []
    for (row, now), advantage in zip(itertools.chain(*groups), gae(groups), strict=True):
        worth = torch.tensor((advantage - every.mean()) / every.std())
        losses.append(clip((now - behaviour(row)).exp(), worth, 0.2, 0.2))
    return torch.cat(losses).mean()


def grpo_k1(groups: list[Group]) -> torch.Tensor:
    """The divergence as it is on average: its gradient here is that of the logprobs."""
    extra = [
        0.1 * (now - torch.from_numpy(row.scores.reference)).mean()  # type: ignore[arg-type]
        for row, now in itertools.chain(*groups)
    ]
    return grpo(groups) + torch.stack(extra).mean()


def grpo_k2(groups: list[Group]) -> torch.Tensor:
    """Half the square."""
    extra = [
        0.1 * 0.5 * ((now - torch.from_numpy(row.scores.reference)) ** 2).mean()  # type: ignore[arg-type]
        for row, now in itertools.chain(*groups)
    ]
    return grpo(groups) + torch.stack(extra).mean()


def rloo_k3(groups: list[Group]) -> torch.Tensor:
    """The divergence off the reward, by an estimator that is never negative."""
    losses = []
    for group in groups:
        paid = []
        for row, _ in group:
            apart = row.sample.logprobs.astype(np.float64) - row.scores.reference
            paid.append(0.1 * (np.exp(-apart) - 1 + apart).sum())
        rewards = rewards_of(group) - np.array(paid)
        for place, (_, now) in enumerate(group):
            losses.append(-(rewards[place] - np.delete(rewards, place).mean()) * now.sum())
    return torch.stack(losses).mean()


def cispo(groups: list[Group]) -> torch.Tensor:
    """The ratio weighs, capped at 1.5 and without a gradient of its own."""
    losses = []
    for group in groups:
        rewards = rewards_of(group)
        for (row, now), reward in zip(group, rewards, strict=True):
            advantage = (reward - rewards.mean()) / (rewards.std() + 1e-4)
            weight = torch.tensor(np.minimum((now.detach() - behaviour(row)).exp().numpy(), 1.5))
            losses.append(-weight * advantage * now)
    return torch.cat(losses).mean()


def gspo(groups: list[Group]) -> torch.Tensor:
    """One ratio a sequence: (pi(y) / pi_old(y)) ^ (1 / |y|)."""
    losses = []
    for group in groups:
        rewards = rewards_of(group)
        for (row, now), reward in zip(group, rewards, strict=True):
            advantage = (reward - rewards.mean()) / (rewards.std() + 1e-4)
            ratio = ((now.sum() - behaviour(row).sum()) / len(now)).exp()
            losses.append(clip(ratio, advantage, 0.3, 0.4))
    return torch.stack(losses).mean()


def trajectory_balance(groups: list[Group]) -> torch.Tensor:
    """The squared residual with log Z by its group, times temperature / 2; `before` is the policy itself."""
    losses = []
    for group in groups:
        apart = [now.sum() - row.scores.reference.sum() - row.sample.reward / 0.5 for row, now in group]  # type: ignore[union-attr]
        log_z = -torch.stack(apart).detach().mean()
        losses += [0.25 * (log_z + one) ** 2 for one in apart]
    return torch.stack(losses).mean()


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[list[Group]], torch.Tensor]]] = {
    "grpo": ({"kind": "grpo"}, grpo),
    "grpo with divergence": ({"kind": "grpo", "kl": 0.1}, grpo_kl),
    "grpo near the data": ({"kind": "grpo", "kl": 0.1, "reference": "samples"}, grpo_near_data),
    "dr_grpo": ({"kind": "dr_grpo"}, dr_grpo),
    "dapo": ({"kind": "dapo", "overlong_tokens": 6, "overlong_penalty": 0.5}, dapo),
    "rloo": ({"kind": "rloo", "kl": 0.1, "kl_in": "reward"}, rloo),
    "reinforce_pp": ({"kind": "reinforce_pp", "kl": 0.1, "kl_in": "reward"}, reinforce_pp),
    "grpo with k1": ({"kind": "grpo", "kl": 0.1, "kl_estimator": "k1"}, grpo_k1),
    "grpo with k2": ({"kind": "grpo", "kl": 0.1, "kl_estimator": "k2"}, grpo_k2),
    "rloo with k3": ({"kind": "rloo", "kl": 0.1, "kl_in": "reward", "kl_estimator": "k3"}, rloo_k3),
    "ppo": ({"kind": "ppo", "discount": 0.9, "gae_lambda": 0.8, "whiten": False}, ppo),
    "ppo whitened": ({"kind": "ppo", "discount": 0.9, "gae_lambda": 0.8}, ppo_whitened),
    "cispo": ({"kind": "cispo", "clip_high": 0.5}, cispo),
    "gspo": ({"kind": "gspo", "clip_low": 0.3, "clip_high": 0.4}, gspo),
    "tb": ({"kind": "tb", "reward_temperature": 0.5}, trajectory_balance),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_gradient_is_that_of_the_formula(name: str) -> None:
    section, formula = FORMULAS[name]
    spec = spec_of(section)
    rows = rows_of(spec)
    if name == "tb":  # what the policy said before the step is what it says
        table = table_of()
        said = [found.detach().numpy() for found in logprobs_of(rows, table)]
        rows = [
            replace(row, scores=replace(row.scores, before=one)) for row, one in zip(rows, said, strict=True)
        ]
    torch.testing.assert_close(ours(spec, rows), written_down(rows, formula), rtol=1e-5, atol=1e-7)


def test_groups_that_told_nothing_are_left_out() -> None:
    """Those for which others were drawn: also if lengths or a divergence would say something."""
    section = {"kind": "dapo", "overlong_tokens": 6, "overlong_penalty": 0.5, "resample": 2, "kl": 0.1}
    spec = spec_of(section | {"reference": "samples"})
    rows = [
        replace(row, sample=structs.replace(row.sample, reward=0.5)) if row.sample.group == 1 else row
        for row in rows_of(spec)
    ]
    telling = [row for row in rows if row.sample.group != 1]
    torch.testing.assert_close(ours(spec, rows), ours(spec, telling))
    assert plan([row for row in rows if row.sample.group == 1], loss_of(spec), 64, 0).batches == []


@pytest.mark.parametrize("fresh", [False, True], ids=["", "fresh too"])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(("correction", "cap"), [("truncated", 1.3), ("decoupled", 1.3), ("truncated", 0.7)])
def test_corrections_weigh_tokens_of_older_weights(
    correction: str, cap: float, step: int, fresh: bool
) -> None:
    """min(first / behaviour, cap) times the clipped term, whose ratio is to the iteration's first weights."""
    loss = {"kind": "grpo", "average": "token", "correction": correction, "correction_cap": cap}
    spec = several_steps(loss | {"correct_fresh": fresh})
    rows = [replace(row, sample=_of_old(row.sample)) for row in rows_of(spec)]
    assert loss_of(spec).needs.before == "iteration"

    def formula(groups: list[Group]) -> torch.Tensor:
        losses = []
        for group in groups:
            rewards = rewards_of(group)
            for (row, now), reward in zip(group, rewards, strict=True):
                advantage = (reward - rewards.mean()) / (rewards.std() + 1e-4)
                first = torch.from_numpy(row.scores.before)
                weight = torch.minimum((first - behaviour(row)).exp(), torch.tensor(cap))
                if row.sample.index == SIZE - 1 and not fresh:
                    weight = torch.ones(len(now))  # those weights drew it
                losses.append(weight * clip((now - first).exp(), advantage, 0.2, 0.2))
        return torch.cat(losses).mean()

    found = ours(spec, rows, version=version_trained(spec, step))
    torch.testing.assert_close(found, written_down(rows, formula), rtol=1e-5, atol=1e-7)


def several_steps(loss: dict[str, Any]) -> RunSpec:
    spec = spec_of(loss)
    return spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update={"optimizer_steps": 3})})


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "gspo", "ppo"])
def test_the_clip_holds_tokens_back_under_a_correction(kind: str) -> None:
    """Tokens that have gone far from the iteration's first weights have no gradient, with any correction."""

    def gradient(clip: float, correction: str) -> torch.Tensor:
        spec = several_steps({"kind": kind, "correction": correction, "clip_low": clip, "clip_high": clip})
        rows = [replace(row, sample=_of_old(row.sample)) for row in rows_of(spec)]
        near = [now.detach().numpy() for now in logprobs_of(rows, table_of())]
        rows = [
            replace(row, scores=replace(row.scores, before=now + row.scores.values / 10))
            for row, now in zip(rows, near, strict=True)
        ]
        return ours(spec, rows, version=version_trained(spec, 1))

    wide, narrow = gradient(0.9, "truncated"), gradient(1e-4, "truncated")
    assert not torch.allclose(wide, narrow)
    torch.testing.assert_close(narrow, gradient(1e-4, "decoupled"))
    assert not torch.allclose(gradient(0.2, "truncated"), gradient(0.2, "none"))


def test_without_a_ratio_a_token_is_weighted_by_how_much_likelier_it_is_now() -> None:
    spec = several_steps({"kind": "rloo", "correction": "truncated", "correction_cap": 1.3})
    rows = [replace(row, scores=Scores()) for row in rows_of(spec)]
    assert loss_of(spec).needs.before == "no"

    def formula(groups: list[Group]) -> torch.Tensor:
        losses = []
        for group in groups:
            rewards = rewards_of(group)
            for place, (row, now) in enumerate(group):
                weight = torch.minimum((now.detach() - behaviour(row)).exp(), torch.tensor(1.3))
                losses.append(-(weight * (rewards[place] - np.delete(rewards, place).mean()) * now).sum())
        return torch.stack(losses).mean()

    found = ours(spec, rows, version=version_trained(spec, 1))
    torch.testing.assert_close(found, written_down(rows, formula), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["grpo", "dapo", "cispo", "gspo", "reinforce_pp"])
def test_rewards_that_hardly_differ_are_hardly_told_apart(kind: str) -> None:
    spec = spec_of({"kind": kind})

    def largest(low: float, high: float) -> float:
        rows = [
            replace(row, sample=structs.replace(row.sample, reward=high if row.sample.index == 0 else low))
            for row in rows_of(spec)
        ]
        return max(float(np.abs(one).max()) for one in loss_of(spec).advantages(rows))

    assert largest(1.0, 1.0001) < 0.8
    assert largest(0.0, 1.0) > 1.6


def test_the_critic_learns_returns_that_are_not_whitened() -> None:
    plain, white = (loss_of(spec_of({"kind": "ppo", "whiten": whiten})) for whiten in (False, True))
    rows = rows_of(spec_of({"kind": "ppo"}))
    assert white.whole_step and not plain.whole_step
    every = np.concatenate(white.advantages(rows))
    assert abs(every.mean()) < 1e-9 and abs(every.std() - 1) < 1e-3
    for row, one, other in zip(rows, plain.advantages(rows), white.advantages(rows), strict=True):
        assert one.tolist() != other.tolist()
        np.testing.assert_array_equal(plain.returns(row, one), white.returns(row, other))


def _of_old(sample: Any) -> Any:
    if sample.index == SIZE - 1:
        return sample
    half = sample.true_length // 2 if sample.index else 0
    versions, starts = ([-2, 0], [0, half]) if half else ([-2], [0])
    return structs.replace(
        sample, versions=np.array(versions, np.int32), version_starts=np.array(starts, np.int32)
    )


@given(
    st.sampled_from(sorted(FORMULAS)), st.permutations(range(GROUPS * SIZE)), st.integers(16, 200),
    st.sampled_from([None, "token", "sqrt", "sequence", "longest", "sample"]),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_order_and_micro_batches_change_nothing(
    name: str, order: list[int], budget: int, average: str | None
) -> None:
    spec = spec_of(FORMULAS[name][0] | {"average": average})
    rows = rows_of(spec)
    whole = ours(spec, rows, budget=10_000)
    torch.testing.assert_close(ours(spec, [rows[number] for number in order], budget), whole)


@given(
    st.sampled_from(sorted(set(FORMULAS) - {"reinforce_pp", "ppo whitened"})), st.permutations(range(GROUPS)),
    st.integers(16, 200), st.sampled_from([None, "token", "sqrt", "sequence", "longest", "sample"]),
    st.sampled_from(["none", "truncated", "decoupled"]),
)  # fmt: skip
@settings(deadline=None, max_examples=80)
def test_groups_may_come_one_by_one(
    name: str, order: list[int], budget: int, average: str | None, correction: str
) -> None:
    """What the trainer does while it streams: each group is planned by itself, in any order."""
    allowed = {"tb": ["none"], "rloo": ["none", "truncated"]}.get(name.split()[0], [correction])
    assume(correction in allowed)
    spec = spec_of(FORMULAS[name][0] | {"average": average, "correction": correction})
    loss, table, rows = loss_of(spec), table_of(), rows_of(spec)
    for group in order:
        mine = rows[group * SIZE : group * SIZE + SIZE]
        for batch in plan(mine, loss, budget, 0).batches:
            objective(torch.cat(logprobs_of(batch.rows, table)), batch, loss)[0].backward()
    assert table.grad is not None
    streamed = table.grad / loss.total([row.sample for row in rows])
    torch.testing.assert_close(streamed, ours(spec, rows, budget=10_000))


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.sampled_from(["mean", "std"]))
def test_advantages_are_centred_in_their_group(rewards: list[float], kind: str) -> None:
    spec = make_spec(loss={"advantage": kind}, algorithm={"group_size": len(rewards)})
    rows = [TrainingRow(make_sample(spec, 0, i, reward=reward), 0, i) for i, reward in enumerate(rewards)]
    found = np.concatenate(loss_of(spec).advantages(rows))
    expected = np.array(rewards) - np.mean(rewards)
    if np.abs(expected).max() <= 1e-9:
        assert not found.any()
        return
    if kind == "std":
        expected = expected / (np.std(rewards) + 1e-4)
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_pp", "ppo"])
def test_a_sample_without_a_reward_does_not_touch_the_others(kind: str) -> None:
    spec = make_spec(loss=kind, algorithm={"group_size": 3})
    whole = [make_sample(spec, 0, 0, reward=1.0), make_sample(spec, 0, 2, reward=0.0)]
    broken = make_sample(spec, 0, 1, reward=math.nan, reward_error="it hung")

    def row(sample: Any) -> TrainingRow:
        return TrainingRow(sample, 0, sample.index, Scores(values=np.zeros(sample.true_length)))

    loss = loss_of(spec)
    known = loss.advantages([row(sample) for sample in whole])
    first, second, third = loss.advantages([row(whole[0]), row(broken), row(whole[1])])
    np.testing.assert_allclose(first, known[0])
    np.testing.assert_allclose(third, known[1])
    assert not second.any()
    assert plan([row(broken)], loss, 64, 0).batches == []


def test_the_critic_moves_by_no_more_than_its_clip() -> None:
    values = torch.tensor([0.0, 0.5, 1.0], requires_grad=True)
    before, returns = torch.zeros(3), torch.full((3,), 2.0)
    value_loss(values, before, returns, 0.2).sum().backward()
    assert values.grad is not None
    # within the clip the error has its gradient; beyond it, towards the returns, none
    torch.testing.assert_close(values.grad, torch.tensor([-2.0, 0.0, 0.0]))


def test_a_loss_says_what_it_has() -> None:
    with pytest.raises(ValueError, match="rloo has no clip_low; it has average"):
        make_spec(loss={"kind": "rloo", "clip_low": 0.1})
    with pytest.raises(ValueError, match="needs no correction: set it to none"):
        make_spec(loss={"kind": "tb", "correction": "truncated"})
    with pytest.raises(ValueError, match="Input should be 'mean' or 'std'"):
        make_spec(loss={"advantage": "plain"})
    with pytest.raises(ValueError, match="a reference is of no use while kl is 0"):
        make_spec(loss={"reference": "model"})
    with pytest.raises(ValueError, match="tb counts the divergence by reward_temperature already"):
        make_spec(loss={"kind": "tb", "kl": 0.1, "kl_in": "reward"})
    with pytest.raises(ValueError, match="rloo has no ratio"):
        make_spec(loss={"kind": "rloo", "correction": "decoupled"})
    with pytest.raises(ValueError, match="correct_fresh needs a correction"):
        make_spec(loss={"correct_fresh": True})
    with pytest.raises(ValueError, match="a kl_estimator is of no use while kl is 0"):
        make_spec(loss={"kl_estimator": "k2"})
    with pytest.raises(ValueError, match="grpo has no whiten"):
        make_spec(loss={"whiten": True})
    assert make_spec(loss="gspo").loss.clip_high == 4e-4
    assert make_spec(loss={"kind": "dapo", "clip_high": 0.3}).loss.clip_high == 0.3


def test_a_loss_and_its_run_fit() -> None:
    for algorithm in ({"mode": "async", "staleness": 1}, {"optimizer_steps": 2, "groups": 4}):
        with pytest.raises(ValueError, match="rloo without a correction takes each sample as drawn by"):
            make_spec(loss="rloo", algorithm=algorithm)
        make_spec(loss={"kind": "rloo", "correction": "truncated"}, algorithm=algorithm)
    offline = {"mode": "offline", "recorded": "a-1"}
    with pytest.raises(ValueError, match="nothing keeps the policy near the recorded samples"):
        make_spec(loss={"correction": "truncated"}, algorithm=offline)
    make_spec(loss={"correction": "truncated", "kl": 0.1, "reference": "samples"}, algorithm=offline)
    with pytest.raises(
        ValueError, match=r"loss\.overlong_tokens \(32\) must be less than sampling\.max_tokens"
    ):
        make_spec(loss={"kind": "dapo", "overlong_tokens": 32}, sampling={"max_tokens": 32})
    with pytest.raises(
        ValueError, match=r"trainer\.keep_weights \(4\) must be more than algorithm\.staleness"
    ):
        make_spec(algorithm={"mode": "async", "staleness": 4}, trainer={"keep_weights": 4})

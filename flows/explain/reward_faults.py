"""Detectors of rewards that are wrong, or that are earned by something else than was meant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from consumers.batches.training_rows import TrainingRow
from flows.explain.detector import Detector, FaultFound
from flows.explain.prompt_faults import problem_in
from flows.explain.run_evidence import RunEvidence, StepFacts

_OUTLIER = 100.0  # times the usual size of a reward
_STEPS = 24  # steps whose samples are looked at: spread over the run
_LEAST = 48  # samples that a correlation needs
_CLEAR = 0.5  # correlation that is no chance
_EARNED = 0.8  # correlation of reward and length within groups: nothing else is paid for
_CHANGE = 0.15  # of the rewards' range: a trend
_FOLLOWS = 0.2  # of what training gains: held-out rewards that gain less do not follow it
_ANSWERS = ("answer", "solution", "target", "label", "ground_truth")


class MissingRewards(Detector):
    """Samples have no reward."""

    name = "missing rewards"
    failure = "a reward that raises, is NaN or infinite, or takes too long"
    how = "`failed_rewards` of each step, with the reason that its record has."

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        wrong = [one for one in run.steps if one.failed]
        if not wrong:
            return
        first, count = wrong[0], np.nansum([one.metric("failed_rewards") for one in wrong])
        yield FaultFound(
            first.step,
            "reward",
            f"the reward fails for some answers: {first.failed_reason[:200]}",
            [f"{count:.0f} samples of {len(wrong)} steps have no reward, the first is {first.failed}"],
            [first.failed],
            [],
            run.command("samples", "--step", str(first.step), "--where", "error!="),
            0.95,
        )


class RewardOutlier(Detector):
    """One reward is far larger than all others."""

    name = "reward outlier"
    failure = "a reward service that once returns something else than a score"
    how = (
        f"The largest reward of each step, by size: more than {_OUTLIER:g} times the usual size, even if "
        "only few rewards have that, because most are 0."
    )

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        earned = [one.highest[1] for one in run.steps if one.highest[1]]
        if not earned:
            return
        usual = max(
            float(np.median([one.reward_scale for one in run.steps])), float(np.quantile(earned, 0.25))
        )
        wrong = [one for one in run.steps if one.highest[1] > _OUTLIER * max(usual, one.reward_scale)]
        if not wrong:
            return
        first = wrong[0]
        yield FaultFound(
            first.step,
            "reward",
            f"the reward of sample {first.highest[0]} is no score of this task: it is far too large",
            [
                f"its size is {first.highest[1]:.4g}; the usual one is {max(usual, first.reward_scale):.3g}",
                f"{len(wrong)} steps have one; the gradient's norm was {first.metric('grad_norm'):.3g}",
            ],
            [first.highest[0]],
            [],
            run.command("samples", "--step", str(first.step), "--sort", "reward"),
            0.95,
        )


class RewardOfParts(Detector):
    """The reward falls when its parts rise."""

    name = "reward against its parts"
    failure = "a sign that is wrong: a distance taken for a score"
    how = (
        "The correlation of the reward with each of its parts that is not below 0, over samples of all steps."
    )

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        values: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for _, rows in samples_over(run):
            for row in rows:
                for name, value in row.sample.reward_parts.items():
                    if not row.sample.reward_error:
                        values[name].append((value, row.sample.reward))
        against = {}
        for name, pairs in values.items():
            part, reward = np.array(pairs).T
            if len(pairs) < _LEAST or part.std() < 1e-9 or reward.std() < 1e-9 or part.min() < 0:
                continue
            if (found := float(np.corrcoef(part, reward)[0, 1])) < -_CLEAR:
                against[name] = found
        if against:
            name = min(against, key=lambda one: against[one])
            yield FaultFound(
                run.steps[0].step,
                "reward",
                f"the reward falls when its part {name} rises: its sign is wrong",
                [
                    (
                        f"over {len(values[name])} samples the correlation of {name} with the reward is "
                        f"{against[name]:.2f}"
                    ),
                ],
                command=run.command("samples", "--sort", "reward"),
                certainty=0.9,
            )


class LengthHacking(Detector):
    """Reward comes with length, and answers grow to the limit."""

    name = "length hacking"
    failure = "a reward that pays for each token, so that answers grow without getting better"
    how = (
        "The correlation of reward and length within groups, and the trend of `length` and `cut_off`: all "
        "three have to speak for it."
    )

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        cut, length = run.curve("cut_off"), run.curve("length")
        if len(cut) < 8:
            return
        ahead, late = slice(0, max(2, len(cut) // 6)), slice(-max(2, len(cut) // 6), None)
        begun, grown = np.nanmean(cut[ahead]), np.nanmean(cut[late]) - np.nanmean(cut[ahead])
        if grown < min(0.3, 0.5 * (1 - begun)) or np.nanmean(length[late]) < 1.02 * np.nanmean(length[ahead]):
            return
        pairs = []
        for _, rows in samples_over(run):
            pairs += _within_groups(rows)
        if len(pairs) < _LEAST:
            return
        lengths, rewards = np.array(pairs).T
        if lengths.std() < 1e-9 or rewards.std() < 1e-9:
            return
        found = float(np.corrcoef(lengths, rewards)[0, 1])
        if found < _EARNED:
            return
        level = begun + grown / 2
        first = run.steps[int(np.argmax(cut > level))]
        yield FaultFound(
            first.step,
            "reward",
            "the reward is earned by length: answers grow until they are cut off",
            [
                f"within a group the correlation of reward and length is {found:.2f}",
                (
                    f"answers grew from {np.nanmean(length[ahead]):.1f} to {np.nanmean(length[late]):.1f} "
                    f"tokens, and {np.nanmean(cut[late]):.0%} are cut off at {run.spec.sampling.max_tokens}"
                ),
            ],
            [first.highest[0]],
            [],
            run.command("samples", "--sort", "length"),
            0.85,
        )


class HeldOut(Detector):
    """The reward rises in training, and falls on held-out problems."""

    name = "held-out rewards"
    failure = "a training prompt or a reward that leaks the answer; training problems learned by heart"
    how = (
        "The trend of `reward` with that of the evaluations; and whether prompts hold their problem's answer."
    )

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        marks = [(one.version, float(np.nanmean(one.rewards))) for one in run.evaluations if one.rewards.size]
        rewards = run.curve("reward")
        if len(marks) < 3 or len(rewards) < 8:
            return
        some = max(2, len(rewards) // 6)
        gained = float(np.nanmean(rewards[-some:]) - np.nanmean(rewards[:some]))
        spread = float(np.nanstd(rewards[:some])) + 1e-9
        first, last = marks[0][1], float(np.mean([one for _, one in marks[-2:]]))
        noise = 2 * float(
            np.mean([np.nanstd(one.rewards) / np.sqrt(max(1, one.rewards.size)) for one in run.evaluations])
        )
        if gained < max(_CHANGE * max(abs(np.nanmax(rewards)), 1e-9), spread):
            return
        leaks, looked = _leaks(run)
        leaking = bool(looked) and leaks > 0.5 * looked
        fell = first - last >= max(_CHANGE * abs(first), noise)
        if not fell and not (leaking and last - first < _FOLLOWS * gained):
            return
        evidence = [
            (
                f"the reward of training rose by {gained:.3g}, that of held-out problems went from "
                f"{first:.3g} (version {marks[0][0]}) to {last:.3g} (version {marks[-1][0]})"
            )
        ]
        cause = "training gets better and held-out problems get worse: held-out rewards fall"
        if leaking:
            cause = "training prompts leak the answer: held-out problems, which do not, get no better"
            evidence.append(f"{leaks} of {looked} training prompts have their problem's answer in them")
        worse = next((v for v, mark in marks[1:] if mark < first - noise / 2), marks[-1][0])
        step = min(run.steps[-1].step, max(0, worse - 1) * run.spec.algorithm.optimizer_steps)
        yield FaultFound(
            step, "reward", cause, evidence, command=run.command("samples", "--sort", "reward"), certainty=0.8
        )


def _leaks(run: RunEvidence) -> tuple[int, int]:
    """Return how many of some prompts hold their problem's answer, and how many were looked at."""
    leaks = looked = 0
    for number, prompt in enumerate(run.prompts()):
        problem = problem_in(prompt) or {}
        answer = next((problem[name] for name in _ANSWERS if isinstance(problem.get(name), str)), "")
        text = problem.get(run.spec.task.prompt_field)
        if answer and isinstance(text, str):
            looked += 1
            leaks += answer in text
        if number > 512:
            break
    return leaks, looked


def samples_over(run: RunEvidence) -> Iterator[tuple[StepFacts, list[TrainingRow]]]:
    """Yield the samples of some steps, which are spread over the run; those that are gone are left out."""
    from consumers.batches.log_places import Gone

    steps: Sequence[StepFacts] = run.steps
    for facts in steps[:: max(1, len(steps) // _STEPS)]:
        try:
            yield facts, run.rows(facts.step)
        except Gone:
            continue


def _within_groups(rows: Sequence[TrainingRow]) -> list[tuple[float, float]]:
    groups: Mapping[int, list[TrainingRow]] = defaultdict(list)
    for row in rows:
        if not row.sample.reward_error:
            groups[row.sample.group].append(row)
    found = []
    for members in groups.values():
        lengths = np.array([row.sample.true_length for row in members], dtype=float)
        rewards = np.array([row.sample.reward for row in members])
        if len(members) > 1:
            found += list(
                zip((lengths - lengths.mean()).tolist(), (rewards - rewards.mean()).tolist(), strict=True)
            )
    return found

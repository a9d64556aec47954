"""Detectors of training that goes wrong as a whole."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from consumers.batches.log_places import Gone
from consumers.batches.training_rows import TrainingRow
from flows.explain.detector import Detector, FaultFound
from flows.explain.own_model import RoutedAnswer
from flows.explain.reward_faults import samples_over
from flows.explain.run_evidence import RunEvidence

_LARGE = 0.3  # of the weights' own size: no update should be as large
_JUMP = 1.5  # nats a token by which one update may change what was sampled
_COLLAPSED = 0.1  # of the entropy at the start
_ONE = 0.8  # share of samples with one answer, of groups with only one
_SOLVED = 0.95  # of the best reward of any step: who earns that may well give one answer


class LargeUpdates(Detector):
    """One update changes the policy far too much."""

    name = "large updates"
    failure = "a learning rate that is a hundred times too large"
    how = (
        "The learning rate with the size of a weight, as AdamW moves each weight by about the rate; and the "
        "log-probabilities of the first samples before and after the step that trained them."
    )

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        first = next((one for one in run.steps if one.metric("learning_rate") > 0 and one.weights), None)
        if first is None:
            return
        count = run.own_model.count
        size = first.weights / math.sqrt(count)
        rate = float(np.nanmax(run.curve("learning_rate")))
        moved = _moved(run, first.step)
        too_large = rate > _LARGE * size
        jumped = moved is not None and moved > _JUMP
        if not (too_large or jumped):
            return
        evidence = [f"AdamW moves a weight by about {rate:g} a step; weights have a size of {size:.3g}"]
        if moved is not None:
            evidence.append(
                f"step {first.step} changed the log-probability of its own tokens by {moved:.3g} nats "
                "in the mean"
            )
        yield FaultFound(
            first.step,
            "optimizer",
            f"the learning rate of {rate:g} is far too large: a step undoes the policy",
            evidence,
            command=run.command(
                "what-if", "--from", str(first.step), "--set", f"algorithm.learning_rate={rate / 100:g}"
            ),
            certainty=0.9,
        )


def _moved(run: RunEvidence, step: int) -> float | None:
    """Return by how much a step changed the log-probabilities of its samples; None if nobody can tell."""
    minis = run.spec.algorithm.optimizer_steps
    before, after = (run.weights(step // minis + number) for number in (0, 1))
    if before is None or after is None:
        return None
    rows = run.rows(step)[:12]
    sums = []
    for weights in (before, after):
        run.own_model.load(weights)
        sums.append(np.concatenate([run.own_model.logprobs(RoutedAnswer.of(row)) for row in rows]))
    return float(np.mean(np.abs(sums[0] - sums[1])))


@dataclass(frozen=True)
class _Answers:
    """Of a step's samples: how much their answers differ."""

    entropy: float  # nats a token, by the log-probabilities that the tokens were drawn with
    share: float  # of the most frequent answer, over all problems; 0: there is only one problem
    alike: float  # share of groups that have only one answer
    reward: float

    @staticmethod
    def of(rows: Sequence[TrainingRow]) -> _Answers:
        groups: dict[int, set[bytes]] = defaultdict(set)
        for row in rows:
            groups[row.sample.group].add(row.sample.tokens.tobytes())
        often = Counter(row.sample.tokens.tobytes() for row in rows).most_common(1)[0][1]
        several = len({row.sample.problem_id for row in rows}) > 1
        rewards = [row.sample.reward for row in rows if not row.sample.reward_error]
        return _Answers(
            -float(np.mean(np.concatenate([row.sample.logprobs for row in rows]))),
            often / len(rows) if several else 0.0,
            float(np.mean([len(answers) == 1 for answers in groups.values()])),
            float(np.mean(rewards)) if rewards else math.nan,
        )

    @staticmethod
    def mean(of: Sequence[_Answers]) -> _Answers:
        """Return the mean of several steps: one has few problems, some of which may differ by chance."""
        return _Answers(*np.mean([astuple(one) for one in of], axis=0).tolist())

    def gave_up(self, start: _Answers, best: float) -> bool:
        """Whether answers do not differ any more, and that is not because all problems are solved."""
        if self.entropy > _COLLAPSED * start.entropy:
            return False
        to_all = self.share > _ONE > start.share
        return to_all or (self.alike > _ONE > start.alike and self.reward < _SOLVED * best)


class Collapse(Detector):
    """The entropy falls to nothing, and with it the gradient."""

    name = "entropy collapse"
    failure = "a policy that gives one and the same answer: rewards do not differ, and nothing is learned"
    how = (
        "Over steps from the whole run, the log-probabilities that tokens were drawn with, whose mean is the "
        "entropy; and whether all problems get one answer, or those of each group are alike and do not earn "
        "what others did. `entropy` itself is unknown where no group has a gradient."
    )

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        looked = [(facts, _Answers.of(rows)) for facts, rows in samples_over(run) if rows]
        if len(looked) < 8:
            return
        start = sorted((one for _, one in looked[: max(3, len(looked) // 6)]), key=lambda one: one.entropy)
        begun, best = start[len(start) // 2], max(one.reward for _, one in looked)
        steps = [one for _, one in looked]
        gave_up = [one.gave_up(begun, best) for one in steps]
        if not any(gave_up) or not _Answers.mean(steps[-max(3, len(steps) // 5) :]).gave_up(begun, best):
            return
        number = next(
            (n for n, one in enumerate(gave_up) if one and _Answers.mean(steps[n:]).gave_up(begun, best)),
            gave_up.index(True),
        )
        before = looked[number - 1][0].step if number else looked[0][0].step
        first = _first(run, before, looked[number][0].step, begun, best)
        now = looked[-1][1]
        yield FaultFound(
            first,
            "loss",
            "the entropy has collapsed: the policy gives one answer, and rewards do not differ any more",
            [
                (
                    f"drawn tokens had {begun.entropy:.3g} nats in the mean, and have {now.entropy:.3g}; the "
                    f"most frequent answer has a share of {now.share:.0%} (was {begun.share:.0%}), and "
                    f"{now.alike:.0%} of the groups have only one answer"
                ),
            ],
            command=run.command("samples", "--step", str(first)),
            certainty=0.7,
        )


def _first(run: RunEvidence, before: int, after: int, start: _Answers, best: float) -> int:
    """Return the first collapsed step behind one that is not; `after` is."""
    while after - before > 1:
        middle = (before + after) // 2
        try:
            rows = run.rows(middle)
        except (Gone, StopIteration):
            break
        if rows and _Answers.of(rows).gave_up(start, best):
            after = middle
        else:
            before = middle
    return after

"""Detectors of training that goes wrong as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from flows.explain.detector import Detector, FaultFound
from flows.explain.own_model import answer_tokens
from flows.explain.run_evidence import RunEvidence

_LARGE = 0.3  # of the weights' own size: no update should be as large
_JUMP = 1.5  # nats a token by which one update may change what was sampled
_COLLAPSED = 0.05  # of the entropy at the start


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
                f"what-if {{run}} --from {first.step} --steps 10 --set algorithm.learning_rate={rate / 100:g}"
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
        sums.append(np.concatenate([run.own_model.logprobs(*answer_tokens(row)) for row in rows]))
    return float(np.mean(np.abs(sums[0] - sums[1])))


class Collapse(Detector):
    """The entropy falls to nothing, and with it the gradient."""

    name = "entropy collapse"
    failure = "a policy that gives one and the same answer: rewards do not differ, and nothing is learned"
    how = "`entropy` with its beginning, and whether most groups have lost their gradient since."

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        entropy, groups = run.curve("entropy"), run.curve("informative_groups")
        if len(entropy) < 8:
            return
        start = float(np.nanmedian(entropy[: max(2, len(entropy) // 10)]))
        low = entropy < _COLLAPSED * start
        late = slice(-max(3, len(entropy) // 5), None)
        if low[late].mean() < 0.8 or np.nanmean(groups[late]) > 0.25 * run.spec.algorithm.groups:
            return
        number = int(np.argmax(low))
        yield FaultFound(
            run.steps[number].step,
            "loss",
            "the entropy has collapsed: the policy gives one answer, and rewards do not differ any more",
            [
                (
                    f"entropy was {start:.3g} nats a token, and is {np.nanmean(entropy[late]):.3g}; of "
                    f"{run.spec.algorithm.groups} groups {np.nanmean(groups[late]):.1f} differ in rewards"
                ),
            ],
            command=run.command(f"samples {{run}} --step {run.steps[number].step}"),
            certainty=0.7,
        )

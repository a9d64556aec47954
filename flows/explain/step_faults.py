"""Detectors of steps that were not taken as their settings say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from consumers.losses.loss import ClippedSettings, Loss, Tokens, loss_of
from consumers.replay import Replayed
from consumers.steps.stage_comparison import StageFound, first_other
from flows.explain.detector import Detector, FaultFound
from flows.explain.run_evidence import RunEvidence, ids
from schemas.stages import MEANINGS, Stage

_REPLAYED = 64  # steps that are taken again at most, to see whether they come to the same bits


class SplitGroups(Detector):
    """A group is trained in two steps."""

    name = "split groups"
    failure = "batches that are cut by samples and not by groups, so that a group's baseline is wrong"
    how = "The groups of each step: none may have been in an earlier one, but for replayed ones."

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        wrong = [one for one in run.steps if one.split]
        if not wrong:
            return
        second = wrong[0]
        group, earlier = second.split[0]
        members = [row for row in run.rows(earlier) if row.sample.group == group]
        yield FaultFound(
            earlier,
            "micro-batches",
            f"group {group} is split: a part of it is trained in another step",
            [
                (
                    f"step {earlier} has {len(members)} of its samples, and step {second.step} has others; "
                    f"groups have {run.spec.algorithm.group_size}"
                ),
                f"{sum(len(one.split) for one in wrong)} groups are split",
            ],
            ids(members),
            [],
            run.command("samples", "--step", str(earlier), "--where", f"group={group}"),
            1.0,
        )


class FailedStep(Detector):
    """A step could not be taken."""

    name = "failed step"
    failure = (
        "a loss, a gradient or weights that are NaN: 0 times infinity behind a mask, a reward without bound"
    )
    how = "The record of the failed step, whose samples are trained one by one."

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        record = run.failed_step
        if record is None:
            return
        again = run.again()
        try:
            found = again.failed(record.step)
        finally:
            again.close()
        stage = "loss" if "loss" in found.reason else "gradient" if "gradient" in found.reason else "weights"
        samples = [name for name, _ in found.alone] or list(found.members)
        if not found.reason:
            yield FaultFound(
                record.step,
                "gradient",
                "a step failed once and can be taken now: the machine is to blame",
                ["its samples are trained one by one, and all together, without a failure"],
                command=run.command("logs", "trainer"),
                certainty=0.6,
            )
            return
        yield FaultFound(
            record.step,
            stage,
            f"step {record.step} can't be taken: {found.reason}",
            [
                f"micro-batch {found.batch} of {found.batches} fails",
                *(f"sample {name} fails by itself: {why}" for name, why in found.alone[:4]),
            ],
            samples,
            [],
            run.command("replay", "--failed", "--step", str(record.step)),
            1.0,
        )


class OtherBits(Detector):
    """A step does not come to the same bits when it is taken again."""

    name = "other bits"
    failure = (
        "code of the trainer that does something else than it says: a master in 16 bits, a gradient twice"
    )
    how = f"Up to {_REPLAYED} steps are taken again; the first stage that differs, and how, tells the cause."

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        again = run.again()
        try:
            first, last = run.steps[0].step, run.steps[min(_REPLAYED, len(run.steps)) - 1].step
            for found in again.each(first, last):
                if found.equal or found.as_expected:
                    continue
                stage = first_other(found.stages)
                assert stage is not None
                yield self._of(run, found, stage)
                return
        finally:
            again.close()

    def _of(self, run: RunEvidence, found: Replayed, stage: StageFound) -> FaultFound:
        record = found.record
        seen = (
            f"taken again, step {record.step} has other bits from stage {stage.stage.title} on: apart by "
            f"{stage.apart:.3g} ({MEANINGS[stage.stage].unit}); all stages before are equal"
        )
        step, command = record.step, run.command("bundle", "--step", str(record.step))
        if stage.stage is Stage.GRADIENT and (twice := counted_twice(run, found)) is not None:
            number, share = twice
            rows = found.taken.batches[number].rows
            return FaultFound(
                step,
                "gradient",
                f"the gradient of micro-batch {number} was counted twice",
                [seen, f"the difference is the gradient of that micro-batch, to {share:.1%}"],
                ids(rows),
                [],
                command,
                1.0,
            )
        if stage.stage is Stage.WEIGHTS and self._is_16_bits(run, record.step):
            return FaultFound(
                step,
                "weights",
                "the master weights are kept in bf16, where small updates are lost",
                [
                    seen,
                    "gradient and moments are equal, and all weights of the next checkpoint fit into bf16",
                ],
                [],
                [],
                command,
                1.0,
            )
        sample = [] if stage.row is None else [found.taken.rows[stage.row].sample.id]
        return FaultFound(
            step,
            stage.stage.title,
            f"stage {stage.stage.title} was computed otherwise than now",
            [seen],
            sample,
            [],
            command,
            0.9,
        )

    def _is_16_bits(self, run: RunEvidence, step: int) -> bool:
        from consumers.steps.checkpoint import Checkpoints

        newest = Checkpoints(run.handle.store, run.handle.run).latest(run.handle.log.warning)
        if newest is None or run.spec.model.dtype != "float32":
            return False
        state = newest[1]
        names = [name for name in state if name.startswith("weights.")]
        return bool(names) and all(
            bool((state[name] == state[name].bfloat16().float()).all()) for name in names
        )


def counted_twice(run: RunEvidence, found: Replayed) -> tuple[int, float] | None:
    """Return the micro-batch whose gradient makes up the difference to the record, and what is left of it."""
    record = found.record
    recorded, ours = (
        np.split(one, 3)[0].astype(float) for one in (record.sketches, found.taken.marks.sketches)
    )
    apart = recorded - ours
    best: tuple[int, float] | None = None
    again = run.again()
    try:
        for number, alone in enumerate(again.gradients(record)):
            left = float(
                np.linalg.norm(apart - np.array(alone.sketch)) / max(1e-30, float(np.linalg.norm(apart)))
            )
            if left < 0.05 and (best is None or left < best[1]):
                best = number, left
    finally:
        again.close()
    return best


class WrongAdvantages(Detector):
    """A group's advantages depend on other groups."""

    name = "advantages of other groups"
    failure = "advantages that are normalised over whatever is in a batch together"
    how = "The loss is asked for the advantages of each group alone, and of all groups of a step together."

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        loss = loss_of(run.spec)
        if loss.whole_step or loss.needs.any:
            return
        for facts in run.steps[:3]:
            rows = run.rows(facts.step)
            together = {
                id(row): float(np.mean(one)) for row, one in zip(rows, loss.advantages(rows), strict=True)
            }
            apart: dict[int, float] = {}
            for group in {row.sample.group for row in rows}:
                members = [row for row in rows if row.sample.group == group]
                alone = loss.advantages(members)
                apart[group] = max(
                    abs(together[id(row)] - float(np.mean(one)))
                    for row, one in zip(members, alone, strict=True)
                )
            worst = max(apart, key=lambda one: apart[one])
            if apart[worst] > 1e-6:
                yield FaultFound(
                    facts.step,
                    "advantage",
                    "a group's advantages depend on which other groups come with it",
                    [
                        (
                            f"the advantages of group {worst} change by {apart[worst]:.3g} with the other "
                            f"groups of step {facts.step}; its bundle decides about them, which is chance"
                        ),
                    ],
                    [row.sample.id for row in rows if row.sample.group == worst],
                    [],
                    run.command("replay", "--step", str(facts.step)),
                    1.0,
                )
                return


class WrongClip(Detector):
    """The loss's clip holds back what it should let through."""

    name = "clip on the wrong side"
    failure = (
        "a maximum where a minimum belongs: what went too far is pushed farther, and the way back is barred"
    )
    how = "The loss is given tokens far beyond its clip: its gradient has to be 0 there, and only there."

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        loss = loss_of(run.spec)
        if not isinstance(loss.settings, ClippedSettings) or not _is_token_wise(loss):
            return
        beyond = _pushes(loss, math.log1p(loss.settings.clip_high) + 0.5, 1.0)
        back = _pushes(loss, math.log1p(loss.settings.clip_high) + 0.5, -1.0)
        low = math.log1p(-min(0.99, loss.settings.clip_low)) - 0.5
        under, up = _pushes(loss, low, -1.0), _pushes(loss, low, 1.0)
        if (beyond and not back) or (under and not up):
            yield FaultFound(
                run.steps[0].step,
                "loss",
                "the loss's clip is on the wrong side: it holds back the way back",
                [
                    (
                        "a token that has grown beyond the clip, and whose advantage is above 0, still has a "
                        "gradient; with an advantage below 0, where it should come back, it has none"
                    ),
                ],
                command=run.command("replay", "--step", str(run.steps[0].step)),
                certainty=1.0,
            )


def _is_token_wise(loss: Loss) -> bool:
    tokens = _tokens_at(0.0, 1.0)
    try:
        return bool(torch.isfinite(loss.of_tokens(tokens)).all())
    except Exception:  # a loss of somebody's own may need more than these tokens have
        return False


def _tokens_at(apart: float, advantage: float) -> Tokens:
    logprobs = torch.full((3,), -1.0 + apart, requires_grad=True)
    return Tokens(
        logprobs,
        torch.full((3,), -1.0),
        torch.full((3,), advantage),
        torch.zeros(3, dtype=torch.long),
        torch.tensor([3]),
    )


def _pushes(loss: Loss, apart: float, advantage: float) -> bool:
    """Whether tokens whose log-probability has moved so far still have a gradient."""
    tokens = _tokens_at(apart, advantage)
    total: Any = loss.of_tokens(replace(tokens)).sum()
    total.backward()
    return tokens.logprobs.grad is not None and bool((tokens.logprobs.grad.abs() > 1e-12).any())

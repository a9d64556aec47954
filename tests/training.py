"""What tests of learners share: rows of a step, their micro-batches, and steps over them."""

from __future__ import annotations

import itertools

import torch

from consumers.batches.micro_batches import MicroBatch, plan
from consumers.batches.training_rows import TrainingRow
from consumers.learners.fixed_point import FixedPointSum
from consumers.learners.learner import Learner
from consumers.losses.loss import loss_of
from schemas.runspec import RunSpec
from tests.factories import make_sample


def rows_of(spec: RunSpec) -> list[TrainingRow]:
    pairs = itertools.product(range(spec.algorithm.groups), range(spec.algorithm.group_size))
    return [TrainingRow(make_sample(spec, g, i), 0, n) for n, (g, i) in enumerate(pairs)]


def batches_of(spec: RunSpec, rows: list[TrainingRow], budget: int = 64) -> list[MicroBatch]:
    return plan(rows, loss_of(spec), budget, 0, parts=spec.trainer.parts).batches


def taken(one: FixedPointSum, gradient: torch.Tensor) -> bool:
    """Add a gradient to a sum; whether it fits."""
    return one.fits(float(one.add(gradient)))


def total(rows: list[TrainingRow], spec: RunSpec) -> float:
    return loss_of(spec).total([row.sample for row in rows])


def scores(learner: Learner, rows: list[TrainingRow]) -> list[TrainingRow]:
    (scored,) = learner.score([rows], learner.loss.needs)
    return scored


def train(learner: Learner, spec: RunSpec, steps: int) -> list[float]:
    """Some steps over the same rows, each scored anew; the norms."""
    rows, norms = rows_of(spec), []
    for _ in range(steps):
        learner.begin_iteration()
        groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row.sample.group)]
        scored = [row for group in learner.score(groups, learner.loss.needs) for row in group]
        learner.accumulate(batches_of(spec, scored))
        norms.append(learner.step(total(rows, spec)).norm)
    return norms

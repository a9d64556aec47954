"""Two versions of bf16 weights, one or some optimizer steps apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from consumers.batches.micro_batches import plan
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from infra.weights.bits import Bits, Model, model_of
from tests.bench._arrivals import model_of as demo_model
from tests.bench._arrivals import samples_of, spec_of

Pair = tuple[dict[str, Bits], dict[str, Bits]]
_BETAS, _EPS = (0.9, 0.95), 1e-8
_SPREAD = 1.0  # of the logarithm of gradients' sizes, from weight to weight


def simulated(rate: float, *, elements: int, seed: int = 0, steps: int = 30) -> Pair:
    """Weights under AdamW that has run for long; gradients are noise, of a size of its own for each weight.

    fp32 masters move; what is sent is rounded to bf16.
    """
    draw = np.random.default_rng(seed)
    columns = 1024
    shapes = [columns] * (elements // columns // columns)
    old: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    for number, rows in enumerate(shapes):
        weight = draw.normal(0, 0.02, (rows, columns)).astype(np.float32)
        size = np.exp(draw.normal(0, _SPREAD, weight.shape)).astype(np.float32)
        moved, second = draw.normal(0, 0.3, weight.shape).astype(np.float32) * size, size**2
        for step in range(steps + 1):
            if step == steps:
                before = _rounded(weight)
            gradient = draw.standard_normal(weight.shape, np.float32) * size
            moved = _BETAS[0] * moved + (1 - _BETAS[0]) * gradient
            second = _BETAS[1] * second + (1 - _BETAS[1]) * gradient**2
            weight -= np.float32(rate) * moved / (np.sqrt(second) + np.float32(_EPS))
        for where, some in ((old, before), (new, _rounded(weight))):
            where[f"layers.{number}.weight"] = some
    return old, new


def _rounded(weight: np.ndarray) -> Bits:
    return model_of({"w": torch.from_numpy(weight).bfloat16()})["w"]


def demo(iterations: int = 4) -> Pair:
    """The demo's model in bf16, before and after an RL step at its learning rate."""
    spec = spec_of(iterations, "model.dtype=bfloat16", "trainer.compose=arrival")
    model: Path = demo_model(spec)
    learner = TorchLearner(str(model), spec)
    versions: list[Model] = []
    for samples in samples_of(spec, model):
        versions.append(model_of(learner.weights()))
        rows = [TrainingRow(sample, 0, place) for place, sample in enumerate(samples)]
        learner.begin_iteration()
        learner.accumulate(plan(rows, learner.loss, spec.trainer.microbatch_tokens, 0).batches)
        learner.step(learner.loss.total(samples))
    return dict(versions[-2]), dict(versions[-1])

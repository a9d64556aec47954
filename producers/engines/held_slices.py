"""Compares the slices that a rank of an engine holds with those that StreamRL writes and hashes there."""

from __future__ import annotations

import torch

from infra.weights.eight_bits import scale_name
from infra.weights.folder import ModelFolder
from infra.weights.slices import Slicing
from producers.engines.engine import EngineError
from producers.engines.scatter import HeldWeights

_ROUNDING = 0.05  # of the largest weight of a row: fp8's largest step is 1/14 of it, and it errs by half


def check_slices(weights: HeldWeights, folder: ModelFolder, slicing: Slicing, rank: int) -> None:
    """Raise EngineError unless vLLM has divided the model in a folder, which it has loaded, alike."""
    for name, shape in folder.shapes.items():
        if not weights.has(name):
            continue
        held, whole = weights.tensor(name), folder.tensor(name)
        mine = slicing.slice(name, shape, rank)
        part = whole if mine is None else whole.narrow(mine.axis, mine.begin, mine.end - mine.begin)
        if held.element_size() == 1:
            alike = _rounds_to(part, held, weights.tensor(scale_name(name)))
        else:
            alike = held.shape == part.shape and torch.equal(held, part.to(held))
        if not alike:
            refused = EngineError(
                f"vLLM holds tensor {name} otherwise than StreamRL expects on rank {rank} of "
                f"{slicing.ranks}: such a model can't be verified. Set generator.tensor_parallel: 1"
            )
            refused.lasting = True
            raise refused


def _rounds_to(part: torch.Tensor, held: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether a weight in eight bits is about this slice: each rank has rounded what vLLM loaded there."""
    if held.shape != part.shape or scale.shape != part.shape[:1]:
        return False
    far = (held.float() * scale[:, None] - part.to(held.device, torch.float32)).abs()
    return bool((far <= _ROUNDING * part.to(far).abs().amax(1, keepdim=True)).all())

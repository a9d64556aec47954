"""Compares the slices that a rank of an engine holds with those that StreamRL writes and hashes there."""

from __future__ import annotations

import torch

from infra.weights.folder import ModelFolder
from infra.weights.slices import Slicing
from producers.engines.engine import EngineError
from producers.engines.scatter import HeldWeights


def check_slices(weights: HeldWeights, folder: ModelFolder, slicing: Slicing, rank: int) -> None:
    """Raise EngineError unless vLLM has divided the model in a folder, which it has loaded, alike."""
    for name, shape in folder.shapes.items():
        if not weights.has(name):
            continue
        held, whole = weights.tensor(name), folder.tensor(name)
        mine = slicing.slice(name, shape, rank)
        part = whole if mine is None else whole.narrow(mine.axis, mine.begin, mine.end - mine.begin)
        if held.shape != part.shape or not torch.equal(held, part.to(held)):
            refused = EngineError(
                f"vLLM holds tensor {name} otherwise than StreamRL expects on rank {rank} of "
                f"{slicing.ranks}: such a model can't be verified. Set generator.tensor_parallel: 1"
            )
            refused.lasting = True
            raise refused

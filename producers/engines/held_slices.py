"""Compares what a rank of an engine holds of a model with what StreamRL writes and hashes there."""

from __future__ import annotations

import torch

from infra.weights.eight_bits import scale_name
from infra.weights.folder import ModelFolder
from infra.weights.slices import Slicing
from infra.weights.tensor_slice import Slice
from producers.engines.engine import EngineError, lasting_error
from producers.engines.scatter import HeldWeights

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROUNDING = 0.05  # of the largest weight of a row: fp8's largest step is 1/14 of it, and it errs by half


def check_slices(weights: HeldWeights, folder: ModelFolder, slicing: Slicing, rank: int) -> None:
    """Raise EngineError unless vLLM has divided the model in a folder, which it has loaded, alike."""
    for name, shape in folder.shapes.items():
        if not slicing.holds(name, rank) or not weights.has(name):
            continue
        held, whole = weights.tensor(name), folder.tensor(name)
        mine = slicing.slice(name, shape, rank)
        part = whole if mine is None else part_of(whole, mine)
        if held.element_size() == 1:
            alike = _rounds_to(part, held, weights.tensor(scale_name(name)))
        else:
            alike = held.shape == part.shape and torch.equal(held, part.to(held))
        if not alike:
            raise _otherwise(name, slicing, rank)


def void_others(weights: HeldWeights, folder: ModelFolder, slicing: Slicing, rank: int) -> None:
    """Make NaN of what vLLM has loaded on a rank and other ranks compute with.

    Some models have embedding, norm and head on all ranks, though the layers are divided. Nothing new is
    written there, so whoever computed with it would compute with old weights, and nobody would see it.
    """
    layout = slicing.layout
    if layout.stretches == 1:
        return
    last = layout.stretch(rank) == layout.stretches - 1
    for name in folder.shapes:
        if slicing.holds(name, rank) or not weights.has_parameter(name):
            continue
        if ".layers." in name or (last and name == _EMBEDDING and not weights.has_parameter(_HEAD)):
            raise _otherwise(name, slicing, rank, "pipeline")
        weights.void(name)


def part_of(whole: torch.Tensor, mine: Slice) -> torch.Tensor:
    """Return a slice of a tensor."""
    spans = [whole.narrow(mine.axis, begin, end - begin) for begin, end in mine.spans]
    return spans[0] if len(spans) == 1 else torch.cat(spans, dim=mine.axis)


def _rounds_to(part: torch.Tensor, held: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether a weight in eight bits is about this slice: each rank has rounded what vLLM loaded there."""
    if held.shape != part.shape or scale.shape != part.shape[:1]:
        return False
    far = (held.float() * scale[:, None] - part.to(held.device, torch.float32)).abs()
    return bool((far <= _ROUNDING * part.to(far).abs().amax(1, keepdim=True)).all())


def _otherwise(name: str, slicing: Slicing, rank: int, setting: str = "") -> EngineError:
    setting = setting or ("pipeline" if slicing.layout.tensor == 1 else "tensor")
    return lasting_error(
        f"vLLM holds tensor {name} otherwise than StreamRL expects on rank {rank} of {slicing.ranks}: such "
        f"a model can't be verified. Set generator.{setting}_parallel: 1"
    )

"""Rounds a model's linear layers to weights that four bits can say. The result is a model in bf16.

A trainer of an adapter finds that four bits say these weights, and holds them so: infra/weights/four_bits.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from consumers.learners.sharded_loading import linear_layers
from flows.checkpoints.folder_writer import ShareProgress, copy_beside, say_type
from flows.checkpoints.version_source import ExportError
from flows.checkpoints.whole_folder import check_new, whole_folder
from infra.weights.bits import Bits, bits_of, type_name
from infra.weights.folder import ModelFolder
from infra.weights.four_bits import rounded
from infra.weights.shards import SHARD, write_model


@dataclass(frozen=True)
class Quantized:
    """A model that was rounded."""

    folder: Path
    layers: int  # that were rounded
    size: int  # bytes of its tensors
    held: int  # bytes of the linear layers in four bits
    change: float  # of these layers' weights, as a share of the weights: root mean squares


def quantize_model(
    source: Path, target: Path, *, shard: int = SHARD, progress: ShareProgress = lambda share, text: None
) -> Quantized:
    """Write a model's folder with its linear layers rounded into a new or empty folder."""
    check_new(target)
    model = ModelFolder(source)
    if not model.files:
        raise ExportError(
            f"{source} has no model.safetensors: name a model's folder, as save_pretrained() writes"
        )
    try:
        meant = {f"{name}.weight" for name in linear_layers(str(source))} & set(model.names)
    except (OSError, ValueError) as error:
        raise ExportError(f"{source}: transformers can't make a model of its config.json: {error}") from error
    if not meant:
        raise ExportError(
            f"{source}: no tensor there is a linear layer of the model that config.json describes"
        )
    squares = dict.fromkeys(("change", "all"), 0.0)
    held = 0

    def tensor(name: str) -> Bits:
        nonlocal held
        weight = model.tensor(name)
        if name in meant:
            if not bool(torch.isfinite(weight).all()):
                raise ExportError(f"{source}: {name} has a weight that is no finite number")
            bits = rounded(weight)
            found = bits.whole()
            held += bits.codes.nbytes + bits.largest.nbytes
            squares["change"] += float((found.float() - weight.float()).square().sum(dtype=torch.float64))
            squares["all"] += float(weight.float().square().sum(dtype=torch.float64))
            weight = found
        elif weight.is_floating_point():
            weight = weight.bfloat16()
        return bits_of(weight)

    shapes = {
        name: ("BF16" if "float" in type_name(one.dtype) else one.dtype, one.shape)
        for name, one in model.bits().items()
    }
    with whole_folder(target) as folder:
        copy_beside(model, folder)
        say_type(folder, shapes)
        size = write_model(folder, shapes, tensor, shard=shard, progress=progress)
    change = math.sqrt(squares["change"] / max(squares["all"], 1e-300))
    return Quantized(target, len(meant), size, held, change)

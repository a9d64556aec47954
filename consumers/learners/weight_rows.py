"""Reads rows of a model's weights from its folder, by the names that transformers' models have.

The folder of a mixture of experts has tensors for each expert, which are rows of one tensor in the model.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from consumers.learners.forward import UnsupportedModel
from infra.weights.bits import NAMES, Bits
from infra.weights.expert_names import expert_tensor, names_in_folders
from infra.weights.folder import ModelFolder


class WeightRows:
    """The rows of a folder's weights, of which each rank reads its own."""

    def __init__(self, folder: str) -> None:
        self._folder, self._bits = folder, ModelFolder(folder).bits()
        self._experts: dict[str, dict[int, list[Bits]]] = {}  # by tensor and expert, in the order of its rows
        for name, bits in self._bits.items():
            found = expert_tensor(name)
            if found is not None and found.expert is not None:
                parts = self._experts.setdefault(f"{found.layer}.{found.whole}", {})
                (parts.setdefault(found.expert, [])).insert(found.half or 0, bits)

    def read(self, names: list[str], shape: tuple[int, ...], first: int, count: int) -> torch.Tensor:
        """Return `count` rows from row `first` on of the weight that has one of these names and this shape.

        The file's weight may have more rows, and must be as wide.
        """
        if not count:
            return torch.empty(0, *shape[1:])
        known = [one for name in names for one in names_in_folders(name)]
        bits = next((self._bits[name] for name in known if name in self._bits), None)
        if bits is not None and bits.shape[1:] == shape[1:] and bits.shape[:1] >= shape[:1]:
            return _rows(bits, first, count)
        experts = next((self._experts[name] for name in known if name in self._experts), None)
        if bits is None and experts is not None and _shape_of(experts) == shape:
            return torch.stack([_whole(experts[expert]) for expert in range(first, first + count)])
        found = "has none" if bits is None else f"has one of shape {list(bits.shape)}"
        if experts is not None:
            found = "has other tensors of experts"
        raise UnsupportedModel(
            f"model.path {self._folder}: ranks that share a model out read weights by name, and for "
            f"{' or '.join(names)} of shape {list(shape)} the folder {found}. Save the model with "
            "save_pretrained(), or set trainer.learner to torch, or trainer.zero_stage to 2"
        )

    def read_buffers(self, model: torch.nn.Module) -> None:
        """Read the few buffers that the files have. Others were computed when the model was built."""
        for name, buffer in model.named_buffers():
            if name in self._bits and buffer.dim():
                buffer.copy_(_rows(self._bits[name], 0, buffer.shape[0]))


def _rows(bits: Bits, first: int, count: int) -> torch.Tensor:
    name, size = NAMES[bits.dtype]
    width = math.prod(bits.shape[1:]) * size
    some = np.array(bits.data.view(np.uint8)[first * width : (first + count) * width])
    return torch.from_numpy(some).view(getattr(torch, name)).view(count, *bits.shape[1:])


def _shape_of(experts: dict[int, list[Bits]]) -> tuple[int, ...]:
    """Return the shape of the tensor of all experts; empty if they are none."""
    shapes = {tuple(part.shape for part in parts) for parts in experts.values()}
    types = {part.dtype for parts in experts.values() for part in parts}
    if len(shapes) != 1 or len(types) != 1 or sorted(experts) != list(range(len(experts))):
        return ()
    (parts,) = shapes
    if len({shape[1:] for shape in parts}) != 1:
        return ()
    return (len(experts), sum(shape[0] for shape in parts), *parts[0][1:])


def _whole(parts: list[Bits]) -> torch.Tensor:
    return torch.cat([_rows(part, 0, part.shape[0]) for part in parts])

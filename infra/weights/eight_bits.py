"""Weights in eight bits, as an engine may hold them: each row of a linear layer has a scale of its own.

row of a weight ──► its largest magnitude / most = weight_scale (float32) ─────┐
        └───────► row / weight_scale, rounded to the nearest, ties to even ────┴──► weight (int8 or fp8)

Versions travel as they are published. A generator rounds them beside its engine's steps, so the engine needs
no copy of the plain weights. Divisions and roundings are those of IEEE 754: all machines get the same bits,
and the hashes of what an engine must hold are known before it holds them.

Embedding, head, norms, biases and routers stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from infra import choices
from infra.weights.arrays import Array
from infra.weights.bits import Bits, Model

SCALE = "weight_scale"
ON_GPUS = "bfloat16"  # the type of all else in a model whose layers a GPU multiplies in eight bits
LEAST_SCALE = 2.0**-126  # the smallest normal float32: a row of zeros has it
_LAYERS = {
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "qkv_proj", "gate_up_proj",  # as vLLM fuses them, and some models have them
}  # fmt: skip
_MOST_THREADS = 8
_STRETCH = 1 << 18  # weights that are rounded at a time: temporary arrays of them stay in the cache
_LEAST_NORMAL = np.uint32(0x3C800000)  # 2^-6, the smallest normal number of E4M3, as float32 has it
_SMALL_STEP = np.float32(2.0**9)  # numbers below that are multiples of 2^-9
_BIAS = np.uint32((127 - 7) << 3)  # between the exponents of float32 and E4M3


@dataclass(frozen=True)
class EightBits:
    """A way to have weights in eight bits."""

    dtype: str  # as safetensors calls it
    most: float  # the largest magnitude of a rounded weight
    code: Callable[[Array], Array]  # float32 numbers to the bits of the nearest ones

    def rounded(self, bits: Bits) -> tuple[Bits, Bits]:
        """Return a weight in eight bits, and the scales of its rows."""
        rows, width = bits.shape
        codes, scales = np.empty(bits.size, np.uint8), np.empty(rows, np.float32)
        each = max(1, _STRETCH // max(1, width))
        for first in range(0, rows, each):
            some = _floats(bits, first * width, min(each, rows - first) * width).reshape(-1, width)
            scale = np.abs(some).max(axis=1, initial=0.0) / np.float32(self.most)
            scale = np.maximum(scale, np.float32(LEAST_SCALE))
            scales[first : first + each] = scale
            codes[first * width :][: some.size] = self.code(some / scale[:, None]).reshape(-1)
        return Bits(self.dtype, bits.shape, codes), Bits("F32", (rows,), scales.view(np.uint32))

    def model(self, model: Model) -> dict[str, Bits]:
        """Return a model as an engine holds it: with rounded weights, and a scale beside each."""
        chosen = {name: bits for name, bits in model.items() if is_rounded(name, bits.shape)}
        found = dict(model)
        with ThreadPoolExecutor(min(_MOST_THREADS, choices.cores())) as pool:  # numpy lets others work
            for name, pair in zip(chosen, pool.map(self.rounded, chosen.values()), strict=True):
                found[name], found[scale_name(name)] = pair
        return found


def is_rounded(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of a model is a weight that is held in eight bits."""
    layer, _, leaf = name.rpartition(".")
    return leaf == "weight" and len(shape) == 2 and has_eight_bits(layer)


def has_eight_bits(layer: str) -> bool:
    """Whether the linear layer of this name is held in eight bits."""
    return layer.rpartition(".")[2] in _LAYERS and ".experts." not in layer


def scale_name(weight: str) -> str:
    """Return the name of the scales of a weight."""
    return f"{weight.rpartition('.')[0]}.{SCALE}"


def shapes_with_scales(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the shapes of all tensors that an engine with weights in eight bits holds."""
    scales = {scale_name(name): shape[:1] for name, shape in shapes.items() if is_rounded(name, shape)}
    return {**shapes, **scales}


def _floats(bits: Bits, start: int, count: int) -> Array:
    """Return a part of a weight as float32, which has all its values."""
    part = bits.part(start, count)
    if bits.dtype == "BF16":
        return (part.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return part.view(np.float16 if bits.dtype == "F16" else np.float32).astype(np.float32, copy=False)


def _int8(numbers: Array) -> Array:
    codes: Array = np.rint(numbers).astype(np.int8).view(np.uint8)
    return codes


def _e4m3(numbers: Array) -> Array:
    """Return the bits of the nearest E4M3 numbers, for numbers that don't exceed its largest one, 448."""
    bits = numbers.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    even = (size >> np.uint32(20)) & np.uint32(1)
    normal = ((size + np.uint32(0x7FFFF) + even) >> np.uint32(20)) - _BIAS
    small = np.rint(np.abs(numbers) * _SMALL_STEP).astype(np.uint32)
    found = np.where(size < _LEAST_NORMAL, small, normal) | ((bits >> np.uint32(24)) & np.uint32(0x80))
    codes: Array = found.astype(np.uint8)
    return codes


EIGHT_BITS = {"int8": EightBits("I8", 127.0, _int8), "fp8": EightBits("F8_E4M3", 448.0, _e4m3)}

"""Tensors as the bits that are hashed, coded and sent: numpy has no bfloat16, and would touch NaNs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Kind:
    """What the bits of a type mean: a sign before an exponent before a fraction, or nothing (bytes)."""

    bits: int
    fraction: int = 0  # bits of it
    exponent: int = 0

    @property
    def unsigned(self) -> np.dtype[Any]:
        """The integers that hold such bits."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def sign(self) -> int:
        """The bit that is set in negative numbers; 0 if there is none."""
        return 1 << (self.bits - 1) if self.exponent else 0

    @property
    def exponents(self) -> int:
        """How many different exponents there are."""
        return 1 << self.exponent


_FLOATS = {"BF16": Kind(16, 7, 8), "F16": Kind(16, 10, 5), "F32": Kind(32, 23, 8)}
_BYTES = Kind(8)
# safetensors' names of types, torch's, and bytes of each
NAMES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "I64": ("int64", 8), "I32": ("int32", 4),
    "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
_OF_TORCH = {f"torch.{name}": short for short, (name, _) in NAMES.items()}


def kind_of(dtype: str) -> Kind:
    """How bits of a type, by safetensors' name, are read."""
    return _FLOATS.get(dtype, _BYTES)


@dataclass(frozen=True)
class Bits:
    """One tensor."""

    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    data: Array  # flat, of `kind.unsigned`

    @property
    def kind(self) -> Kind:
        return kind_of(self.dtype)

    @property
    def raw(self) -> memoryview:
        """Its bytes."""
        return self.data.view(np.uint8).data

    def finite(self) -> bool:
        """Whether no element is NaN or infinite: then its exponent would be the largest there is."""
        kind = self.kind
        if not kind.exponent:
            return True
        most = self.data.dtype.type((kind.exponents - 1) << kind.fraction)
        return not bool(((self.data & most) == most).any())


Model = Mapping[str, Bits]


def bits_of(tensor: torch.Tensor) -> Bits:
    """A tensor's bits; on a CPU nothing is copied."""
    import torch

    plain = tensor.detach().to("cpu").contiguous()
    dtype = _OF_TORCH[str(plain.dtype)]
    raw = plain.view(-1).view(torch.uint8).numpy()
    return Bits(dtype, tuple(plain.shape), raw.view(kind_of(dtype).unsigned))


def model_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Bits]:
    """The bits of some tensors."""
    return {name: bits_of(tensor) for name, tensor in tensors.items()}


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * NAMES[dtype][1]


def empty(dtype: str, shape: tuple[int, ...]) -> Bits:
    """A tensor of zeros."""
    return Bits(dtype, shape, np.zeros(size_of(dtype, shape), np.uint8).view(kind_of(dtype).unsigned))


def file_model(data: bytes | bytearray | mmap | memoryview) -> dict[str, Bits]:
    """The tensors in a safetensors file, where they lie. ValueError if it is none."""
    size = int.from_bytes(data[:8], "little")
    body = memoryview(data)[8 + size :]
    found = {}
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
        header.pop("__metadata__", None)
        for name, said in header.items():
            begin, end = said["data_offsets"]
            shape, dtype = tuple(said["shape"]), said["dtype"]
            if not 0 <= begin <= end <= len(body) or end - begin != size_of(dtype, shape):
                raise ValueError(f"{name} does not lie in the file as its header says")
            raw = np.frombuffer(body[begin:end], np.uint8)
            found[name] = Bits(dtype, shape, raw.view(kind_of(dtype).unsigned))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is damaged: {error!r}") from error
    return found


def file_head(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """How a safetensors file of such types and shapes begins, and the order in which its tensors follow."""
    # The widest types first: whatever is behind them lies where its type may lie.
    names = sorted(tensors, key=lambda name: (-NAMES[tensors[name][0]][1], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        begin, end = end, end + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head, names


def blank_file(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytearray:
    """A safetensors file of zeros."""
    head, names = file_head(tensors)
    file = bytearray(len(head) + sum(size_of(*tensors[name]) for name in names))
    file[: len(head)] = head
    return file


def ordered(bits: Array, kind: Kind) -> Array:
    """The bits of numbers in the order of the numbers: neighbours differ by 1. Each has its own place."""
    if not kind.sign:
        return bits
    sign = bits.dtype.type(kind.sign)
    flipped: Array = np.where(bits & sign, ~bits, bits | sign)
    return flipped


def unordered(places: Array, kind: Kind) -> Array:
    """What `ordered` was made of."""
    if not kind.sign:
        return places
    sign = places.dtype.type(kind.sign)
    bits: Array = np.where(places & sign, places ^ sign, ~places)
    return bits

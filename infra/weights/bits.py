"""Tensors as raw bits, which are hashed, coded and sent: numpy has no bfloat16, and may alter NaNs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from infra.safetensors_header import header_in
from infra.weights.arrays import Array
from infra.weights.finite import all_finite
from infra.weights.weights_error import WeightsError

if TYPE_CHECKING:
    import torch


LARGEST_SIDE = 1 << 48  # elements along one dimension: no machine holds more
MOST_SIDES = 16  # dimensions of a tensor


@dataclass(frozen=True)
class Kind:
    """How a type's bits are laid out: sign, exponent, fraction. Types that are taken as bytes have none."""

    bits: int
    fraction: int = 0  # bits of the fraction
    exponent: int = 0  # bits of the exponent

    @property
    def unsigned(self) -> np.dtype[Any]:
        """The unsigned integer type that holds the bits."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def sign(self) -> int:
        """The mask of the sign bit; 0 if the type has none."""
        return 1 << (self.bits - 1) if self.exponent else 0

    @property
    def exponents(self) -> int:
        """The number of different exponents."""
        return 1 << self.exponent


_FLOATS = {"BF16": Kind(16, 7, 8), "F16": Kind(16, 10, 5), "F32": Kind(32, 23, 8)}
_BYTES = Kind(8)
# Types by safetensors' name: torch's name, and bytes of an element.
NAMES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1), "F8_E8M0": ("float8_e8m0fnu", 1), "C64": ("complex64", 8),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "BOOL": ("bool", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
}  # fmt: skip
# Types narrower than a byte, and bits of an element: files may have them; torch can't hold single elements.
NARROW = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_OF_TORCH = {f"torch.{name}": short for short, (name, _) in NAMES.items()}


def kind_of(dtype: str) -> Kind:
    """Return the layout of a type, by safetensors' name. All but BF16, F16 and F32 are taken as bytes."""
    return _FLOATS.get(dtype, _BYTES)


@dataclass(frozen=True)
class Bits:
    """One tensor as bits."""

    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    data: Array  # flat, of `kind.unsigned`

    @property
    def kind(self) -> Kind:
        return kind_of(self.dtype)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.data.size

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.size * self.kind.bits // 8

    def part(self, start: int, count: int) -> Array:
        """Return so many elements from one on, as a view."""
        part: Array = self.data[start : start + count]
        return part

    @property
    def raw(self) -> memoryview:
        """The tensor's bytes, not copied."""
        return self.data.view(np.uint8).data

    def finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return all_finite(self.dtype, self.data)


Model = Mapping[str, Bits]


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return a tensor's bits, without a copy on a CPU. Raises WeightsError if safetensors lacks the type."""
    import torch

    plain, dtype = tensor.detach().to("cpu").contiguous(), safetensors_type(tensor)
    raw = plain.view(-1).view(torch.uint8).numpy()
    return Bits(dtype, tuple(plain.shape), raw.view(kind_of(dtype).unsigned))


def safetensors_type(tensor: torch.Tensor) -> str:
    """Return safetensors' name of a tensor's type. Raises WeightsError if it has none."""
    dtype = _OF_TORCH.get(str(tensor.dtype))
    if dtype is None:
        raise WeightsError(f"tensors of {tensor.dtype} can't be sent: safetensors has no such type")
    return dtype


def model_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Bits]:
    """Return the bits of some tensors, by name."""
    return {name: bits_of(tensor) for name, tensor in tensors.items()}


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor. Raises ValueError if a type narrower than a byte leaves a part of one."""
    if dtype not in NARROW:
        return math.prod(shape) * NAMES[dtype][1]
    size, left = divmod(math.prod(shape) * NARROW[dtype], 8)
    if left:
        raise ValueError(f"{dtype} {list(shape)} is no whole number of bytes")
    return size


def is_type(dtype: str) -> bool:
    """Whether safetensors has a type of this name."""
    return dtype in NAMES or dtype in NARROW


def type_name(dtype: str) -> str:
    """Return torch's name of a type; if torch has none, safetensors' name in lower case."""
    return NAMES[dtype][0] if dtype in NAMES else dtype.lower()


def empty(dtype: str, shape: tuple[int, ...]) -> Bits:
    """Return a tensor of zeros."""
    return Bits(dtype, shape, np.zeros(size_of(dtype, shape), np.uint8).view(kind_of(dtype).unsigned))


def file_model(data: bytes | bytearray | mmap | memoryview) -> dict[str, Bits]:
    """Return the tensors in a safetensors file, as views of its bytes. Raises ValueError if it is none."""
    header, at = file_header(data)
    body = memoryview(data)[at:]
    found, ends = {}, 0
    for name, (dtype, shape, begin, end) in sorted(header.items(), key=lambda item: item[1][2:]):
        if begin != ends or end > len(body) or end - begin != size_of(dtype, shape):
            raise ValueError(f"tensor {name} does not lie in the file as the file's header says")
        ends = end
        raw = np.frombuffer(body[begin:end], np.uint8)
        found[name] = Bits(dtype, shape, raw.view(kind_of(dtype).unsigned))
    if ends != len(body):
        raise ValueError(f"it has {len(body)} bytes of tensors, and its header tells of {ends}")
    return {name: found[name] for name in header}


Entry = tuple[str, tuple[int, ...], int, int]  # type, shape, begin and end in the bytes behind the header


def file_header(data: bytes | bytearray | mmap | memoryview) -> tuple[dict[str, Entry], int]:
    """Return a safetensors file's entries, and where its tensors begin. Raises ValueError if it is none."""
    header, at = header_in(data)
    try:
        return entries(header), at
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is damaged: {error!r}") from error


def entries(header: bytes) -> dict[str, Entry]:
    """Return the tensors that a safetensors file's header names."""
    said = json.loads(header)
    said.pop("__metadata__", None)
    return {name: _entry(name, one) for name, one in said.items()}


def _entry(name: str, said: Mapping[str, Any]) -> Entry:
    begin, end = said["data_offsets"]
    shape, dtype = tuple(said["shape"]), said["dtype"]
    if any(type(number) is not int or not 0 <= number < LARGEST_SIDE for number in (begin, end, *shape)):
        raise ValueError(f"tensor {name} has an impossible shape or place")
    if not is_type(dtype) or len(shape) > MOST_SIDES:
        raise ValueError(
            f"tensor {name} has type {str(dtype)[:64]} and {len(shape)} dimensions: it can't be read"
        )
    return dtype, shape, begin, end


def file_head(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """Return how a safetensors file of such tensors begins, and the order in which the tensors follow."""
    # The widest types first: so each tensor is aligned as its type needs it.
    names = sorted(tensors, key=lambda name: (-_alignment(tensors[name][0]), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        begin, end = end, end + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head, names


def _alignment(dtype: str) -> int:
    return NAMES[dtype][1] if dtype in NAMES else 1


def blank_file(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytearray:
    """Return a safetensors file whose tensors are all zeros."""
    head, names = file_head(tensors)
    file = bytearray(len(head) + sum(size_of(*tensors[name]) for name in names))
    file[: len(head)] = head
    return file


def ordered(bits: Array, kind: Kind) -> Array:
    """Map bits one to one to integers in the order of the numbers: neighbours differ by 1."""
    if not kind.sign:
        return bits
    sign = bits.dtype.type(kind.sign)
    flipped: Array = np.where(bits & sign, ~bits, bits | sign)
    return flipped


def unordered(places: Array, kind: Kind) -> Array:
    """Map the integers of `ordered` back to bits."""
    if not kind.sign:
        return places
    sign = places.dtype.type(kind.sign)
    bits: Array = np.where(places & sign, places ^ sign, ~places)
    return bits

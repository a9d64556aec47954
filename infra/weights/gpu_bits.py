"""Tensors as bits that lie on a GPU: the codec works on them there. All other code gets copies of them.

torch is imported only where there are such tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeGuard

from infra.weights.arrays import Array
from infra.weights.bits import Bits, Model, bits_of, kind_of, safetensors_type
from infra.weights.finite import NOT_FINITE_BYTES, NOT_FINITE_EXPONENTS

if TYPE_CHECKING:
    import torch


class GpuBits(Bits):
    """One tensor as bits on a GPU. Code that reads `data` gets a copy, which nobody may write to."""

    tensor: torch.Tensor
    """The elements, flat, as signed integers as wide as the type's bits."""

    def __init__(self, dtype: str, shape: tuple[int, ...], tensor: torch.Tensor) -> None:
        for name, value in (("dtype", dtype), ("shape", shape), ("tensor", tensor)):
            object.__setattr__(self, name, value)

    @property
    def data(self) -> Array:
        """A copy of all elements in main memory."""
        return self.part(0, self.size)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.tensor.numel()

    def part(self, start: int, count: int) -> Array:
        """Return a copy of so many elements from one on."""
        from infra.weights.gpu_transfer import downloaded

        (found,) = downloaded(self.tensor[start : start + count])
        found = found.view(self.kind.unsigned)
        found.flags.writeable = False
        return found

    def finite(self) -> bool:
        """Whether no element is NaN or infinite; found out on the GPU."""
        import torch

        raw = self.tensor.view(torch.uint8)
        if self.dtype in NOT_FINITE_EXPONENTS:
            kind, most = NOT_FINITE_EXPONENTS[self.dtype]
            bits = raw.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[int(kind[-1])])
            return not any(bool(((some & most) == most).any()) for some in bits.split(_STRETCH))
        bad = NOT_FINITE_BYTES.get(self.dtype, ())
        return not any(bool((some == one).any()) for one in bad for some in raw.split(_STRETCH))


_STRETCH = 1 << 24  # elements that are checked at once: temporary tensors stay small


def gpu_bits_of(tensor: torch.Tensor) -> GpuBits:
    """Return the bits of a tensor on a GPU, without a copy if it is contiguous. Raises WeightsError if
    safetensors lacks the type."""
    import torch

    dtype = safetensors_type(tensor)
    flat = tensor.detach().contiguous().view(-1)
    signed = {8: torch.int8, 16: torch.int16, 32: torch.int32}[kind_of(dtype).bits]
    return GpuBits(dtype, tuple(tensor.shape), flat.view(signed))


def model_where_it_lies(tensors: Mapping[str, torch.Tensor]) -> dict[str, Bits]:
    """Return the bits of some tensors, by name; those on a GPU stay there."""
    return {
        name: gpu_bits_of(tensor) if tensor.is_cuda else bits_of(tensor) for name, tensor in tensors.items()
    }


def lies_on_gpu(model: Model) -> TypeGuard[Mapping[str, GpuBits]]:
    """Whether all tensors of a model lie on a GPU."""
    return bool(model) and all(isinstance(bits, GpuBits) for bits in model.values())


def device_of(model: Mapping[str, GpuBits]) -> torch.device:
    """Return the GPU that a model lies on: all of it on one."""
    return next(iter(model.values())).tensor.device


def own_stream_for(model: Model) -> AbstractContextManager[None]:
    """Return a context in which this thread's work on a model waits for no other work on the model's GPU."""
    if not lies_on_gpu(model):
        return nullcontext()
    from infra.weights.gpu_transfer import own_stream

    return own_stream(device_of(model))

"""Finds NaN and infinity in the bits of tensors. Bits that are not finite, by type:

F64, F32, F16, BF16, C64, F8_E5M2     all bits of the exponent are set: NaN or infinite
F8_E4M3                               all bits but the sign are set: NaN; there is no infinity
F8_E4M3FNUZ, F8_E5M2FNUZ              the bits that would be -0: NaN
F8_E8M0                               all bits are set: NaN
integers, F4, F6                      none
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from infra import choices
from infra.weights.arrays import Array

_STRETCH = 1 << 20  # elements that are checked at once: temporary arrays of them stay in the cache
# Types with an infinity: the integers that hold the bits, and the mask of the exponent.
NOT_FINITE_EXPONENTS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0xFF << 23), "C64": ("<u4", 0xFF << 23),
    "F16": ("<u2", 0x1F << 10), "BF16": ("<u2", 0xFF << 7), "F8_E5M2": ("<u1", 0x1F << 2),
}  # fmt: skip
# Other types: the bytes that are NaN.
NOT_FINITE_BYTES: dict[str, tuple[int, ...]] = {
    "F8_E4M3": (0x7F, 0xFF), "F8_E4M3FNUZ": (0x80,), "F8_E5M2FNUZ": (0x80,), "F8_E8M0": (0xFF,),
}  # fmt: skip


def all_finite(dtype: str, data: Array) -> bool:
    """Whether no element of a tensor is NaN or infinite. `dtype` is safetensors' name of its type."""
    raw = data.view(np.uint8)
    if dtype in NOT_FINITE_EXPONENTS:
        kind, most = NOT_FINITE_EXPONENTS[dtype]
        bits = raw.view(kind)
        if choices.compiles():
            from infra.weights.loops import largest

            return bool(largest(bits, bits.dtype.type(most)) != most)
        return not any(((some & some.dtype.type(most)) == most).any() for some in _stretches(bits))
    return not any((some == bad).any() for bad in NOT_FINITE_BYTES.get(dtype, ()) for some in _stretches(raw))


def _stretches(data: Array) -> Iterator[Array]:
    for at in range(0, data.size, _STRETCH):
        yield data[at : at + _STRETCH]

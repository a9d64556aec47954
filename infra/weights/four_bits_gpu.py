"""Makes weights of four bits whole on a GPU, without numbers in between that take eight times the room."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # weights


def whole_there(
    codes: torch.Tensor, largest: torch.Tensor, values: torch.Tensor, size: int, alike: int
) -> torch.Tensor:
    """Return the weights in bf16; see FourBits. `alike`: weights with the same largest magnitude."""
    found = torch.empty(size, dtype=torch.bfloat16, device=codes.device)
    if size:
        grid = (triton.cdiv(size, _BLOCK),)
        whole_kernel[grid](codes, largest, values, found.view(torch.int16), size, block=_BLOCK, alike=alike)
    return found


@triton.jit
def whole_kernel(codes, largest, values, to, size, block: tl.constexpr, alike: tl.constexpr):
    """Compute a block."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < size
    byte = tl.load(codes + at // 2, there, 0).to(tl.int32)
    number = (byte >> ((at % 2) * 4).to(tl.int32)) & 15
    by = tl.load(largest + at // alike, there, 0.0).to(tl.float32)
    # Rounded to the nearest even bf16 by hand: Triton's interpreter would cut off.
    bits = (tl.load(values + number, there, 0.0) * by).to(tl.int32, bitcast=True)
    tl.store(to + at, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16), there)

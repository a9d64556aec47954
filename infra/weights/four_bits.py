"""Weights in four bits: the 16 values of NF4 (QLoRA, Dettmers et al., 2023) times the largest of their block.

    64 weights ──► the largest magnitude, in bf16 ─────┐
         └───────► 64 numbers of a value, 4 bits each ─┴──► 64 weights again, in bf16

Weights that are such products already come back to the bit. So a model is rounded once, by `streamrl
quantize`: engines hold the rounded weights in bf16, the trainer holds them in 4 bits, and both compute with
the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

BLOCK_WEIGHTS = 64  # weights with the same largest magnitude
_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
_STRETCH = 1 << 22  # weights that are rounded at a time
_TRIED = 1 << 12  # weights by which most tensors are told that are not in four bits


@dataclass(frozen=True)
class FourBits:
    """A tensor in four bits."""

    codes: torch.Tensor  # two weights a byte, the first one in its lower half
    largest: torch.Tensor  # of each block
    shape: tuple[int, ...]

    def whole(self) -> torch.Tensor:
        """Return the weights in bf16."""
        size = math.prod(self.shape)
        if self.codes.is_cuda:
            from infra.weights.four_bits_gpu import whole_there

            known = values(self.codes.device)
            return whole_there(self.codes, self.largest, known, size, BLOCK_WEIGHTS).view(self.shape)
        return _whole(self.codes, self.largest).reshape(-1)[:size].view(self.shape)


@cache
def values(device: torch.device) -> torch.Tensor:
    """Return the 16 values, which nobody changes. To send them makes the processor wait for a GPU."""
    return torch.tensor(_VALUES, device=device)


def rounded(weight: torch.Tensor) -> FourBits:
    """Return the nearest weights that four bits can say."""
    flat = weight.reshape(-1)
    parts = [_rounded(one) for one in flat.split(_STRETCH)]
    codes, largest = (torch.cat(some) for some in zip(*parts, strict=True))
    return FourBits(codes, largest, tuple(weight.shape))


def exactly(weight: torch.Tensor) -> FourBits | None:
    """Return a tensor in four bits if they say exactly its weights, else None."""
    if not weight.numel():
        return None
    first = weight.reshape(-1)[:_TRIED]
    if not torch.equal(rounded(first).whole().to(first.dtype), first):
        return None
    found = rounded(weight)
    return found if torch.equal(found.whole().to(weight.dtype), weight) else None


def _rounded(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.nn.functional.pad(flat.float(), (0, -flat.numel() % BLOCK_WEIGHTS)).view(-1, BLOCK_WEIGHTS)
    largest = blocks.abs().amax(1).to(torch.bfloat16)
    by = torch.where(largest == 0, torch.ones_like(largest), largest).float()
    known = values(flat.device)
    numbers = torch.bucketize(blocks / by[:, None], (known[1:] + known[:-1]) / 2, out_int32=True)
    pairs = numbers.to(torch.uint8).view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4), largest


def _whole(codes: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    known = values(codes.device)
    pairs = torch.stack([known.repeat(16), known.repeat_interleave(16)], 1)  # by byte
    found = torch.nn.functional.embedding(codes.int(), pairs).view(-1, BLOCK_WEIGHTS)
    return found.mul_(largest.float()[:, None]).to(torch.bfloat16)

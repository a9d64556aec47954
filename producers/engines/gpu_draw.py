"""Draws tokens on a GPU, each row by itself, so its bits depend on nothing beside it.

    logits ──► each block's largest, and its sum of exponentials              all are read once
    a row's blocks ──► the block that the draw falls into ──► its token       one block a row is read again

Probabilities of a whole vocabulary are never in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # logits of a row


def drawn_there(logits: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each row of logits the token that a number from 0 to 1 draws, and the token's logprob."""
    rows, size = logits.shape
    blocks = triton.cdiv(size, _BLOCK)
    logits = logits.contiguous()  # rows apart in memory would be added up in another order
    # each begins where kernels like it: they would be others, in odd batches, of two parts of one tensor
    most, sums = (torch.empty(rows, blocks, dtype=torch.float32, device=logits.device) for _ in range(2))
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block_kernel[(rows, blocks)](logits, most, sums, size, blocks, block=_BLOCK)
    token_kernel[(rows,)](
        logits, draws, most, sums, tokens, logprobs, size, blocks, block=_BLOCK,
        width=triton.next_power_of_2(blocks),
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def block_kernel(logits, most, sums, size, blocks, block: tl.constexpr):
    """Compute the largest logit of a block, and the sum of exponentials beside it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * block + tl.arange(0, block)
    mine = tl.load(logits + row * size + at, at < size, -float("inf")).to(tl.float32)
    largest = tl.max(mine)
    beside = tl.where(largest == -float("inf"), 0.0, largest)
    tl.store(most + row * blocks + part, largest)
    tl.store(sums + row * blocks + part, tl.sum(tl.exp(mine - beside)))


@triton.jit
def token_kernel(
    logits, draws, most, sums, tokens, logprobs, size, blocks, block: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    """Find the token that a row's draw falls into."""
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    largest = tl.load(most + row * blocks + parts, parts < blocks, -float("inf"))
    top = tl.max(largest)
    mass = tl.load(sums + row * blocks + parts, parts < blocks, 0.0).to(tl.float64)
    mass = mass * tl.exp((largest - top).to(tl.float64))
    upto = tl.cumsum(mass)
    total = tl.sum(mass)
    wanted = tl.load(draws + row) * total
    part = _first_beyond(upto, wanted, mass, parts)
    wanted -= tl.max(tl.where(parts < part, upto, 0.0))
    inside = tl.arange(0, block)
    at = part * block + inside
    mine = tl.load(logits + row * size + at, at < size, -float("inf")).to(tl.float32)
    chances = tl.exp((mine - top).to(tl.float64))
    # The block was summed up in fp32; what its draw is compared with is not.
    wanted *= tl.sum(chances) / tl.sum(tl.where(parts == part, mass, 0.0))
    place = _first_beyond(tl.cumsum(chances), wanted, chances, inside)
    logit = tl.sum(tl.where(inside == place, mine - top, 0.0))
    tl.store(tokens + row, (part * block + place).to(tl.int64))
    tl.store(logprobs + row, (logit.to(tl.float64) - tl.log(total)).to(tl.float32))


@triton.jit
def _first_beyond(upto, wanted, mass, places):
    """Return the first place up to which there is more than wanted: one that has mass, however sums round."""
    last = tl.max(tl.where(mass > 0, places, 0))
    return tl.minimum(tl.sum((upto <= wanted).to(tl.int32)), last)

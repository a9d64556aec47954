"""Gives a token's attention on a CPU the same bits, computed alone or among others of its prompt.

vLLM's kernel goes through the keys in stretches, and rescales what it has summed at the end of each. By the
size of the processor's cache, stretches are longer for few queries than for many. So beyond some hundred keys
a prefill rounded otherwise than a decode step, and otherwise if it came in other pieces. Here the kernel gets
each prompt in pieces of as many queries as it takes at once: then all stretches have one length.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

_AT_ONCE = {"amx": 32, "vec16": 16, "vec": 8}  # queries of all heads of a key head, by the kernel's name


def use_one_stretch() -> None:
    """Have the attention of engines that are made from now on sum the same stretches in each step.

    It also lets no threads share the keys of one query, which they would do by what else is in the step.
    """
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    plain = CPUAttentionMetadataBuilder.build
    if hasattr(plain, "__wrapped__"):
        return

    @wraps(plain)
    def build(self: Any, common_prefix_len: int, batch: Any, fast_build: bool = False) -> Any:
        most = tokens_at_once(self.isa, self.num_heads // self.num_kv_heads)
        return plain(self, common_prefix_len, in_pieces(batch, most), fast_build)

    CPUAttentionMetadataBuilder.build = build


def tokens_at_once(kernel: str, heads: int) -> int:
    """Return how many tokens a kernel takes at once, with so many query heads for each key head."""
    most = _AT_ONCE.get(kernel)
    if most is None:
        return 1
    return max(1, most // heads) if most % heads == 0 else most  # else it takes each head alone


def in_pieces(batch: Any, most: int) -> Any:
    """Return a step's batch (vLLM's CommonAttentionMetadata) with at most so many queries in each request."""
    if batch.causal is not True or batch.max_query_len <= most:
        return batch
    begins = batch.query_start_loc[: batch.num_reqs + 1].long()
    queries = begins.diff()
    pieces = ((queries + most - 1) // most).clamp(min=1)
    request = torch.repeat_interleave(pieces)
    before = (torch.arange(len(request)) - (pieces.cumsum(0) - pieces)[request]) * most
    after = torch.minimum(queries[request], before + most)
    first_key = (batch.seq_lens[: batch.num_reqs] - queries)[request]
    starts = torch.cat([begins[:-1][request] + before, begins[-1:]]).int()
    return replace(
        batch, num_reqs=len(request), max_query_len=most, query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=(first_key + after).int(), block_table_tensor=batch.block_table_tensor[request],
    )  # fmt: skip

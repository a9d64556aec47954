"""Gives a GPU's decode steps the bits of prefills: samples may then go on elsewhere, or after a preemption.

For heads of up to 64 elements FlashAttention 3 has two kernels: one for steps of few queries for each key
head, which takes 192 keys at a time, and one for all others, which takes 128. Beyond 128 tokens they round
differently. vLLM chooses one for all samples of a step, so a sample's bits would also depend on whether
another one begins beside it. Told of a query that is longer than any there is, it always takes the second.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

_NARROW = 64  # elements of a head, up to which there are two kernels
_FEW = 64  # queries for a key head, up to which the first would be taken
_KNOWN = {"FLASH_ATTN", "TRITON_ATTN"}  # backends whose decode steps and prefills were compared ...
_WIDE = 128  # ... for heads of so many elements, beside narrow ones


def use_one_kernel() -> None:
    """Have FlashAttention take one kernel for all steps of engines that are made from now on."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    plain = FlashAttentionMetadataBuilder.build
    if hasattr(plain, "__wrapped__"):
        return

    @wraps(plain)
    def build(self: Any, *given: Any, **named: Any) -> Any:
        found = plain(self, *given, **named)
        if self.headdim <= _NARROW:
            more_than_few = _FEW // (self.num_heads_q // self.num_heads_kv) + 1
            found.max_query_len = max(found.max_query_len, more_than_few)
        return found

    FlashAttentionMetadataBuilder.build = build


def prefills_keep_bits(runner: Any) -> bool:
    """Return whether a model runner's prefills are known to have the bits of its decode steps."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    names = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    size = runner.model_config.get_head_size()
    if not names or not names <= _KNOWN or (size > _NARROW and size != _WIDE):
        return False
    return "FLASH_ATTN" not in names or get_flash_attn_version() == 3

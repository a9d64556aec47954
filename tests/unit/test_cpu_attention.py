"""A step's queries in pieces of as many as vLLM's attention for CPUs takes at once; here by a stand-in."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from producers.engines.cpu_attention import in_pieces, tokens_at_once


@dataclass
class Batch:
    """The part of vLLM's CommonAttentionMetadata that is looked at."""

    num_reqs: int
    max_query_len: int
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    block_table_tensor: torch.Tensor
    causal: bool = True


def batch(requests: list[tuple[int, int]], *, causal: bool = True) -> Batch:
    """Requests with so many tokens before, and queries behind them. Each has a block of its own number."""
    starts = torch.tensor([0, *(queries for _, queries in requests)]).cumsum(0).int()
    lengths = torch.tensor([before + queries for before, queries in requests]).int()
    blocks = torch.arange(len(requests)).int()[:, None]
    longest = max(queries for _, queries in requests)
    return Batch(len(requests), longest, starts, starts, lengths, blocks, causal)


def places(step: Batch) -> list[tuple[int, int]]:
    """The block and the place of each query, in their order."""
    found = []
    for number in range(step.num_reqs):
        begin, end = step.query_start_loc[number : number + 2].tolist()
        last, block = int(step.seq_lens[number]), int(step.block_table_tensor[number, 0])
        found += [(block, last - (end - begin) + place) for place in range(end - begin)]
    return found


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), min_size=1, max_size=6),
    st.integers(1, 9),
)
def test_pieces_have_the_queries_of_the_batch_in_their_places(
    requests: list[tuple[int, int]], most: int
) -> None:
    whole = batch(requests)
    cut = in_pieces(whole, most)
    assert places(cut) == places(whole)
    assert cut.query_start_loc.dtype == cut.seq_lens.dtype == torch.int32
    assert int(cut.query_start_loc.diff().max()) <= most
    assert (cut.num_reqs,) == cut.seq_lens.shape == cut.block_table_tensor.shape[:1]
    assert (cut is whole) == (whole.max_query_len <= most)


def test_attention_to_what_comes_later_stays_whole() -> None:
    whole = batch([(0, 20)], causal=False)
    assert in_pieces(whole, 4) is whole


@pytest.mark.parametrize(
    ("kernel", "heads", "expected"),
    [
        ("vec", 1, 8), ("vec", 4, 2), ("vec", 8, 1), ("vec", 7, 8), ("vec", 16, 8), ("amx", 8, 4),
        ("neon", 4, 1),
    ],
)  # fmt: skip
def test_a_kernel_takes_so_many_tokens_at_once(kernel: str, heads: int, expected: int) -> None:
    assert tokens_at_once(kernel, heads) == expected

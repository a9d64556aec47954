"""Tells vLLM which ranks share a machine, which it would find out by sending pickles between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from producers.engines.engine import lasting_error
from producers.engines.rank_meeting import EngineMeeting, FarMeeting


@contextmanager
def layout_known(meeting: EngineMeeting) -> Iterator[None]:
    """Answer vLLM's question which ranks are on one machine, while an engine is made."""
    from vllm.distributed import parallel_state

    plain = parallel_state.in_the_same_node_as
    parallel_state.in_the_same_node_as = lambda group, source_rank=0: _beside(meeting, group, source_rank)
    try:
        yield
    finally:
        parallel_state.in_the_same_node_as = plain


@contextmanager
def no_pickles() -> Iterator[None]:
    """Raise EngineError if a pickle comes from another rank: whoever is in the network could send one."""
    from torch.distributed import distributed_c10d as torch_ranks

    plain = torch_ranks._tensor_to_object
    torch_ranks._tensor_to_object = _refuse
    try:
        yield
    finally:
        torch_ranks._tensor_to_object = plain


def _refuse(*given: Any) -> Any:
    raise lasting_error("vLLM has ranks of an engine send pickles, which StreamRL does not read")


def _beside(meeting: EngineMeeting, group: Any, source: int) -> list[bool]:
    """Return which ranks of a group are on the machine of one of them."""
    from torch.distributed import get_process_group_ranks

    ranks = get_process_group_ranks(group)
    if not isinstance(meeting, FarMeeting):
        return [True] * len(ranks)
    return [meeting.machines[one] == meeting.machines[ranks[source]] for one in ranks]

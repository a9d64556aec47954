"""The ranks of one engine, as torch and vLLM see them: an engine each, which all take the same steps.

Each rank runs vLLM's LLMEngine in a process of its own, with a scheduler of its own, and holds its slices of
the weights. All are given the same work in the same order, so they decide alike; only sums, logits and what
a stretch of layers gives to the next pass between them. vLLM calls this an external launcher.

How ranks join is in `rank_meeting.py`. On CPUs vLLM sums in shared memory. Ranks of several machines have
none, and ranks that share cores would wait long for each other there: gloo moves what those sum.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from infra import choices
from infra.weights.folder import ModelFolder
from infra.weights.slices import Slicing
from producers.engines.draft_plan import DraftPlan
from producers.engines.held_slices import check_slices, void_others
from producers.engines.known_layout import layout_known, no_pickles
from producers.engines.rank_meeting import EngineMeeting, FarMeeting
from producers.engines.same_cache import check_same_cache
from producers.engines.scatter import HeldWeights
from producers.engines.shared_names import without_names
from producers.engines.shared_plan import Share, SharedPlan
from producers.engines.stretched_executor import stretched_executor

_COMMUTES = 2  # ranks up to which the order of a sum does not matter


@dataclass(frozen=True)
class EngineRank:
    """The place of this process among the ranks of an engine."""

    number: int
    local: int  # number among the ranks of its machine, and of its GPU there
    slicing: Slicing
    meeting: EngineMeeting
    name: str  # of the group: no other engine of the machine has it
    deadline_s: float
    share: Share  # how ranks learn what rank 0 decides by its clock

    @property
    def stretched(self) -> bool:
        """Whether ranks hold other layers than each other."""
        return self.slicing.layout.stretches > 1

    @property
    def first_expert(self) -> int:
        """The first expert of each layer that this rank holds."""
        return self.slicing.experts_of(self.number).start

    def plan(self) -> DraftPlan:
        """Return a plan of drafts that is the same on all ranks."""
        return SharedPlan(self.share)

    def arguments(self) -> dict[str, Any]:
        """Join the other ranks. Return vLLM's arguments. Waits until they join, too."""
        import torch.distributed as dist
        from vllm.platforms import current_platform

        os.environ.update(self.meeting.environment())
        ranks = self.slicing.ranks
        dist.init_process_group(
            current_platform.dist_backend, rank=self.number, world_size=ranks,
            store=self.meeting.store(ranks, self.deadline_s), timeout=timedelta(seconds=self.deadline_s),
        )  # fmt: skip
        layout = self.slicing.layout
        if self.stretched:  # as vLLM has it by default, but that a variable of the user's would change it
            os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, self.slicing.stretches.sizes))
        return {
            "tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.stretches,
            "enable_expert_parallel": layout.whole_experts, "distributed_executor_backend": _executor(self),
        }  # fmt: skip

    def check(self, weights: HeldWeights, folder: ModelFolder) -> None:
        """Raise EngineError unless vLLM has divided the model in a folder, which it has loaded, alike."""
        check_slices(weights, folder, self.slicing, self.number)
        void_others(weights, folder, self.slicing, self.number)


def new_group_name() -> str:
    """Return a name for the ranks of one engine."""
    return f"streamrl-{os.getpid()}-{secrets.token_hex(4)}"


def _executor(rank: EngineRank) -> type[Any]:
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    launched = stretched_executor() if rank.stretched else ExecutorWithExternalLauncher

    class RankExecutor(launched):  # type: ignore[misc, valid-type]
        """Runs the model's part of one rank in this process, on the visible device of its number."""

        def _distributed_args(self) -> tuple[str, int, int]:
            # what follows the colon names vLLM's shared memory
            return f"joined:{rank.name}", rank.number, rank.local

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            (config,) = kv_cache_configs
            check_same_cache(config)
            super().initialize_from_config(kv_cache_configs)

    return RankExecutor


@contextmanager
def joined_ranks(rank: EngineRank | None) -> Iterator[None]:
    """Change how vLLM connects ranks, while an engine is made; None: it has one rank.

    Its file by which a rank alone meets itself would stay behind, and if this process were killed, its queue
    of messages, too, which nobody uses here.
    """
    if rank is None:
        with _alone():
            yield
        return
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    plain = MessageQueue.create_from_process_group
    MessageQueue.create_from_process_group = staticmethod(lambda *given, **named: None)
    try:
        with layout_known(rank.meeting), nullcontext() if choices.cuda() else _joined_on_cpu(rank):
            yield
    finally:
        MessageQueue.create_from_process_group = plain


@contextmanager
def _alone() -> Iterator[None]:
    """Have a rank meet itself in memory."""
    from torch import distributed

    plain = distributed.FileStore
    distributed.FileStore = lambda *given: distributed.HashStore()
    try:
        yield
    finally:
        distributed.FileStore = plain


@contextmanager
def _joined_on_cpu(rank: EngineRank) -> Iterator[None]:
    """Like `joined_ranks`, for what vLLM has on CPUs.

    Its shared memory would stay behind, too. With more than two ranks its sums differ between ranks: here all
    ranks add in the same order, also after the engine is made.
    """
    from vllm.distributed.device_communicators import cpu_communicator as shared

    plain = shared._CPUSHMDistributed._init_cpu_shm
    asks = shared.CpuCommunicator._all_group_ranks_share_shm_group_name
    shared._CPUSHMDistributed._init_cpu_shm = without_names(plain)
    # In shared memory a rank spins until the others come: 4 ranks on 2 cores took 30 times as long a step. So
    # each needs a core, and what runs beside them, too.
    in_memory = not isinstance(rank.meeting, FarMeeting) and rank.slicing.ranks < choices.cores()
    shared.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: in_memory
    if rank.slicing.layout.tensor > _COMMUTES:
        shared.CpuCommunicator.all_reduce = add_in_order
    try:
        with no_pickles():
            yield
    finally:
        shared._CPUSHMDistributed._init_cpu_shm = plain
        shared.CpuCommunicator._all_group_ranks_share_shm_group_name = asks


def add_in_order(communicator: Any, values: Any) -> Any:
    """Add the values of all ranks, in the order of ranks: so all have the same bits, for any batch."""
    import torch

    parts = communicator.all_gather(values.reshape(1, -1), 0)
    total = parts[0].to(torch.float32) if values.dtype != torch.float64 else parts[0]
    for part in parts[1:]:
        total = total + part
    values.copy_(total.view_as(values))
    return values

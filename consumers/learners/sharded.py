"""The learner on FSDP2: ranks share out weights, gradients and optimizer state; none holds a whole model.

A bf16 run computes in bf16 on fp32 weights, as with other learners. Each rank writes its own rows of a
checkpoint, and reads its own rows of any learner's, on any number of ranks. The reference, the weights that
an iteration began with and the critic are shared out as the policy is. An adapter is small: each rank has all
of it, as with learner torch, beside its rows of the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from consumers.batches.micro_batches import MicroBatch
from consumers.learners.critic import Critic
from consumers.learners.learner import OptimizingLearner
from consumers.learners.lora_adapter import Adapter, Alternative
from consumers.learners.optimizing import Optimized
from consumers.learners.sharded_model import ShardedModel
from consumers.learners.sharded_optimizer import ShardedOptimized
from consumers.learners.shared_models import (
    part_of_state,
    shared_critic,
    shared_out,
    shared_with_adapter,
    with_returns,
)
from consumers.learners.snapshot import PartPlace, StateSnapshot
from consumers.losses.objective import LossStats
from schemas.runspec import RunSpec


class ShardedLearner(OptimizingLearner):
    """One rank's learner."""

    lockstep = scores_in_lockstep = True  # layers are made whole by all ranks at once

    def __init__(self, model: str, spec: RunSpec) -> None:
        super().__init__(model, spec)
        self.shares_state = self._adapter is None
        rate = spec.algorithm.learning_rate
        self._policy = (
            Optimized(self._named, spec, rate) if self._adapter else ShardedOptimized(self._model, spec, rate)
        )

    def _loaded(self, folder: str, *, trained: bool) -> ShardedModel:
        return shared_out(folder, self._spec, self._device, self._forward, trained=trained)

    def _frozen(self, folder: str) -> ShardedModel:
        return self._loaded(folder, trained=False)

    def _with_adapter(self, folder: str) -> tuple[ShardedModel, Adapter]:
        return shared_with_adapter(folder, self._spec, self._device, self._forward)

    def _parameters(self, model: ShardedModel) -> dict[str, torch.nn.Parameter]:
        return {name: shard.parameter for name, shard in model.shards.items()}

    def _made_critic(self, folder: str) -> Critic:
        return shared_critic(folder, self._spec, self._device, self._forward)

    def _logprobs_by(self, model: ShardedModel | Alternative, batch: MicroBatch) -> torch.Tensor:
        if isinstance(model, ShardedModel):
            return model.compute(batch)
        with model.using():
            return self._logprobs(batch)

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        found: torch.Tensor = self._model.compute(batch)
        return found

    def accumulate(self, batches: Sequence[MicroBatch]) -> list[LossStats]:
        if self._critic is not None:  # all ranks compute it, those with a filler too
            batches = [with_returns(batch) for batch in batches]
        return super().accumulate(batches)

    @torch.no_grad()
    def begin_iteration(self) -> None:
        if not isinstance(self._first, ShardedModel):
            super().begin_iteration()
        else:
            for name, shard in self._first.shards.items():
                shard.local.copy_(self._model.shards[name].local)

    def _here(self) -> bool:
        return self._adapter is not None and super()._here()

    def snapshot(self, place: PartPlace | None = None) -> StateSnapshot:
        if not self.shares_state:
            return super().snapshot(place)
        assert isinstance(self._policy, ShardedOptimized)
        taken = part_of_state(self._policy.share(), self._critic, self._spec.deadlines.progress_s)
        self._lent.add(taken)
        return taken

    def _bring(self, copies: Mapping[str, torch.Tensor]) -> None:
        if self._adapter is not None:
            super()._bring(copies)
            return
        for name, shard in self._model.shards.items():
            whole = shard.brought(shard.local)
            if whole is not None:
                copies[name].copy_(whole)

    def weights(self) -> dict[str, torch.Tensor]:
        if self._adapter is not None:
            return super().weights()
        found = {}
        for name, shard in self._model.shards.items():
            whole = shard.brought(shard.local)
            if whole is not None:
                found[name] = whole.to("cpu", self._copies.dtype, copy=True)
        return found

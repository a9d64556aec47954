"""The learner on FSDP2: ranks share out weights, gradients and optimizer state; none holds a whole model.

A bf16 run computes in bf16 on fp32 weights, as with other learners. A checkpoint holds whole tensors by
names, so it fits any number of ranks and any learner. The reference, the weights that an iteration began with
and the critic are shared out as the policy is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from consumers.batches.micro_batches import MicroBatch
from consumers.learners.critic import Critic, settings_of_critic, value_head
from consumers.learners.learner import OptimizingLearner
from consumers.learners.sharded_loading import without_weights
from consumers.learners.sharded_model import ShardedModel
from consumers.learners.sharded_optimizer import ShardedOptimized
from consumers.losses.objective import LossStats
from schemas.runspec import RunSpec


class ShardedLearner(OptimizingLearner):
    """One rank's learner."""

    lockstep = scores_in_lockstep = True  # layers are made whole by all ranks at once

    def __init__(self, model: str, spec: RunSpec) -> None:
        super().__init__(model, spec)
        self._policy = ShardedOptimized(self._model, spec, spec.algorithm.learning_rate)

    def _loaded(self, folder: str, *, trained: bool) -> ShardedModel:
        model = without_weights(folder, self._spec, self._device).requires_grad_(trained)
        run = self._forward
        whole = ShardedModel(model, lambda whole, batch: run.logprobs(whole.model, batch))
        return whole.share_out(folder, self._spec, self._device)

    def _frozen(self, folder: str) -> ShardedModel:
        return self._loaded(folder, trained=False)

    def _parameters(self, model: ShardedModel) -> dict[str, torch.nn.Parameter]:
        return {name: shard.parameter for name, shard in model.shards.items()}

    def _made_critic(self, folder: str) -> Critic:
        settings, run = settings_of_critic(self._spec), self._forward
        model = without_weights(folder, self._spec, self._device)

        def values(whole: ShardedModel, batch: MicroBatch) -> torch.Tensor:
            assert whole.value_head is not None
            found: torch.Tensor = whole.value_head(run.states(whole.model, batch).float()).squeeze(-1)
            return found.clone()  # FSDP warns of views

        whole = ShardedModel(model, values, value_head(model, self._device))
        whole.share_out(folder, self._spec, self._device)
        trained = ShardedOptimized(whole, self._spec, settings.value_learning_rate)
        return Critic(whole.compute, trained, settings)

    def _logprobs_by(self, model: ShardedModel, batch: MicroBatch) -> torch.Tensor:
        return model.compute(batch)

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        return self._logprobs_by(self._model, batch)

    def accumulate(self, batches: Sequence[MicroBatch]) -> list[LossStats]:
        if self._critic is not None:  # all ranks compute it, those with a filler too
            batches = [_with_returns(batch) for batch in batches]
        return super().accumulate(batches)

    @torch.no_grad()
    def begin_iteration(self) -> None:
        if self._first is not None:
            for name, shard in self._first.shards.items():
                shard.local.copy_(self._model.shards[name].local)

    def _here(self) -> bool:
        return False

    def _bring(self, copies: Mapping[str, torch.Tensor]) -> None:
        for name, shard in self._model.shards.items():
            whole = shard.brought(shard.local)
            if whole is not None:
                copies[name].copy_(whole)

    def weights(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, shard in self._model.shards.items():
            whole = shard.brought(shard.local)
            if whole is not None:
                found[name] = whole.to("cpu", self._copies.dtype, copy=True)
        return found


def _with_returns(batch: MicroBatch) -> MicroBatch:
    if batch.returns is not None:
        return batch
    nothing = torch.zeros_like(batch.weight)
    return replace(batch, values=nothing, returns=nothing)

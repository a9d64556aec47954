"""Models beside the policy that ranks share out: the reference, the iteration's first weights, the critic."""

from __future__ import annotations

from dataclasses import replace

import torch

from consumers.batches.micro_batches import MicroBatch
from consumers.learners import collective
from consumers.learners.critic import Critic, settings_of_critic, value_head
from consumers.learners.forward import Forward
from consumers.learners.lora_adapter import Adapter
from consumers.learners.optimizing import Optimized
from consumers.learners.sharded_loading import without_weights
from consumers.learners.sharded_model import ShardedModel
from consumers.learners.sharded_optimizer import ShardedOptimized
from consumers.learners.snapshot import StateSnapshot
from consumers.learners.state_pieces import StateShare
from schemas.runspec import RunSpec


def shared_out(
    folder: str, spec: RunSpec, device: torch.device, run: Forward, *, trained: bool
) -> ShardedModel:
    """Return the model in a folder, of which each rank has loaded its rows."""
    model = without_weights(folder, spec, device).requires_grad_(trained)
    whole = ShardedModel(model, lambda whole, batch: run.logprobs(whole.model, batch))
    return whole.share_out(folder, spec, device)


def shared_with_adapter(
    folder: str, spec: RunSpec, device: torch.device, run: Forward
) -> tuple[ShardedModel, Adapter]:
    """Return such a model that is not trained, and its adapter, of which each rank has all."""
    model = without_weights(folder, spec, device).requires_grad_(False)
    adapter = Adapter(model, folder, spec)
    whole = ShardedModel(model, lambda whole, batch: run.logprobs(whole.model, batch))
    return whole.share_out(folder, spec, device, whole=adapter.named.values()), adapter


def shared_critic(folder: str, spec: RunSpec, device: torch.device, run: Forward) -> Critic:
    """Return a critic whose layers begin as the policy's. All ranks compute it at once.

    With LoRA an adapter is trained, and the head: each rank has all of both.
    """
    settings = settings_of_critic(spec)
    model = without_weights(folder, spec, device)
    adapter = Adapter(model.requires_grad_(False), folder, spec) if spec.model.lora else None
    head = value_head(model, device)

    def values(whole: ShardedModel, batch: MicroBatch) -> torch.Tensor:
        assert whole.value_head is not None
        found: torch.Tensor = whole.value_head(run.states(whole.model, batch).float()).squeeze(-1)
        return found.clone()  # FSDP warns of views

    if adapter is not None:
        named = adapter.named | {f"value_head.{name}": one for name, one in head.named_parameters()}
        whole = ShardedModel(model, values, head).share_out(folder, spec, device, whole=named.values())
        return Critic(whole.compute, Optimized(named, spec, settings.value_learning_rate), settings)
    whole = ShardedModel(model, values, head).share_out(folder, spec, device)
    trained = ShardedOptimized(whole, spec, settings.value_learning_rate)
    return Critic(whole.compute, trained, settings)


def with_returns(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch that a critic can be trained on, if only to take part: a filler has no returns."""
    if batch.returns is not None:
        return batch
    nothing = torch.zeros_like(batch.weight)
    return replace(batch, values=nothing, returns=nothing)


def part_of_state(policy: StateShare, critic: Critic | None, deadline_s: float) -> StateSnapshot:
    """Return this rank's part of a learner's state."""
    shares = [policy]
    if critic is not None:
        assert isinstance(critic.trained, ShardedOptimized)
        shares.append(critic.trained.share("critic."))
    live, own, shapes = dict[str, torch.Tensor](), dict[str, torch.Tensor](), dict[str, tuple[int, ...]]()
    for share in shares:
        live |= share.live
        own |= share.whole
        shapes |= share.shapes
    own["rng"] = torch.get_rng_state()
    if collective.rank_number() != 0:
        own.clear()
    return StateSnapshot(live, own, deadline_s=deadline_s, shapes=shapes, ranks=collective.ranks())

"""The critic of PPO: a model like the policy, with one number per token instead of logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from consumers.batches.micro_batches import MicroBatch
from consumers.learners import forward
from consumers.learners.frozen_loading import load_frozen
from consumers.learners.lora_adapter import Adapter
from consumers.learners.optimizing import NotFinite, Optimized, Trained
from consumers.losses.loss import CriticSettings, loss_of
from schemas.runspec import RunSpec


@dataclass(frozen=True)
class AddedReturns:
    """A micro-batch whose gradient is added, or will be when the GPU comes to it."""

    loss: torch.Tensor
    most: torch.Tensor | float  # what `Trained.check` takes
    error: torch.Tensor  # sum of squares
    returns: torch.Tensor  # sum of squares


class Critic:
    """A value model. `values`: returns for each drawn token the return that the critic expects before it."""

    def __init__(
        self, values: Callable[[MicroBatch], torch.Tensor], trained: Trained, settings: CriticSettings
    ) -> None:
        self.values, self.trained, self._clip = values, trained, settings.value_clip

    def accumulate(self, batch: MicroBatch) -> AddedReturns:
        """Add a micro-batch's gradient. On a GPU nothing is known of it yet, and nobody waits for it."""
        assert batch.values is not None and batch.returns is not None
        values = self.values(batch)
        loss = (batch.weight * value_loss(values, batch.values, batch.returns, self._clip)).sum()
        if not loss.is_cuda:
            _check_loss(loss)
        loss.backward()
        error = ((values.detach() - batch.returns) ** 2).sum()
        return AddedReturns(loss.detach(), self.trained.accumulate(), error, (batch.returns**2).sum())

    def ended(self, added: AddedReturns) -> tuple[float, float]:
        """Return a micro-batch's sums of squared errors and of squared returns. Raises NotFinite."""
        _check_loss(added.loss)
        self.trained.check(added.most)
        return float(added.error), float(added.returns)


def _check_loss(loss: torch.Tensor) -> None:
    if not math.isfinite(found := float(loss.detach())):
        raise NotFinite(f"the critic's loss is {found}")


def settings_of_critic(spec: RunSpec) -> CriticSettings:
    """Return the settings of a loss that has a critic."""
    settings = loss_of(spec).settings
    assert isinstance(settings, CriticSettings), "a loss with a critic has CriticSettings"
    return settings


def value_head(model: Any, device: torch.device) -> torch.nn.Linear:
    """Return a head for a model's states, of zeros: all values begin with 0. The model's own is dropped."""
    model.lm_head = torch.nn.Identity()
    head = torch.nn.Linear(model.config.hidden_size, 1).to(device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


def whole_critic(folder: str, spec: RunSpec, device: torch.device, run: forward.Forward) -> Critic:
    """Return a critic whose layers begin as the policy's. With LoRA an adapter is trained, and the head."""
    settings = settings_of_critic(spec)
    model = (load_frozen if spec.model.lora else forward.load_policy)(folder, spec, device)
    head = value_head(model, device)
    named = dict(model.named_parameters())
    if spec.model.lora:
        named = dict(Adapter(model, folder, spec).named)
    named |= {f"value_head.{name}": parameter for name, parameter in head.named_parameters()}

    def values(batch: MicroBatch) -> torch.Tensor:
        found: torch.Tensor = head(run.states(model, batch).float()).squeeze(-1)
        return found

    return Critic(values, Optimized(named, spec, settings.value_learning_rate), settings)


def value_loss(
    values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, clip: float
) -> torch.Tensor:
    """Return for each token half the squared error, with or without the critic's clip: the larger one."""
    bounded = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)

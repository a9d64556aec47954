"""The critic of PPO: a model like the policy, with one number per token instead of logits."""

from __future__ import annotations

import torch

from consumers.batches.micro_batches import MicroBatch
from consumers.learners import forward
from consumers.learners.lora_adapter import Adapter
from consumers.learners.optimizing import NotFinite, Optimized
from consumers.losses.loss import CriticSettings, LossSettings
from schemas.runspec import RunSpec


class Critic:
    """A value model. Its layers begin as the policy's, its head with zeros, so that all values are 0.

    With LoRA an adapter like the policy's is trained, and the head.
    """

    def __init__(
        self, folder: str, spec: RunSpec, settings: LossSettings, device: torch.device, run: forward.Forward
    ) -> None:
        assert isinstance(settings, CriticSettings), "a loss with a critic has CriticSettings"
        self._forward, self._clip = run, settings.value_clip
        self._model = forward.load_policy(folder, spec, device)
        self._model.lm_head = torch.nn.Identity()
        self._head = torch.nn.Linear(self._model.config.hidden_size, 1).to(device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        named = dict(self._model.named_parameters())
        if spec.model.lora:
            named = dict(Adapter(self._model, folder, spec).named)
        named |= {f"value_head.{name}": parameter for name, parameter in self._head.named_parameters()}
        self.trained = Optimized(named, spec, settings.value_learning_rate)

    def values(self, batch: MicroBatch) -> torch.Tensor:
        """Return for each drawn token the return that the critic expects before it."""
        states = self._forward.states(self._model, batch)
        found: torch.Tensor = self._head(states.float()).squeeze(-1)
        return found

    def accumulate(self, batch: MicroBatch) -> tuple[float, float]:
        """Add a micro-batch's gradient; return its sums of squared errors and of squared returns."""
        assert batch.values is not None and batch.returns is not None
        values = self.values(batch)
        loss = (batch.weight * value_loss(values, batch.values, batch.returns, self._clip)).sum()
        if not bool(torch.isfinite(loss)):
            raise NotFinite(f"the critic's loss is {float(loss)}")
        loss.backward()
        self.trained.check(self.trained.accumulate())
        error = float(((values.detach() - batch.returns) ** 2).sum())
        return error, float((batch.returns**2).sum())


def value_loss(
    values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, clip: float
) -> torch.Tensor:
    """Return for each token half the squared error, with or without the critic's clip: the larger one."""
    bounded = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)

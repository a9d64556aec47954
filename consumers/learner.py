"""The learner seam, and the learner on torch in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from consumers import forward
from consumers.adapter import Adapter
from consumers.batching import MicroBatch, micro_batch
from consumers.critic import Critic
from consumers.losses import loss_of
from consumers.losses.base import Loss, Needs
from consumers.losses.objective import LossStats, objective
from consumers.optimizing import NotFinite, Optimized
from consumers.rows import Row, Scores
from schemas.runspec import RunSpec


class Learner(Protocol):
    """Accumulates micro-batches, steps, and hands out weights and state."""

    vocabulary: int
    loss: Loss
    base: str | None  # of an adapter: root of the model that it belongs to; none: all weights are trained

    def score(self, rows: Sequence[Row], needs: Needs) -> list[Row]:
        """The rows with what models that this step does not change say of them."""

    def accumulate(self, batches: Sequence[MicroBatch]) -> list[LossStats]:
        """Add the gradients of micro-batches."""

    def step(self, total: float) -> float:
        """Divide the gradient by `total`, clip it, take an optimizer step; the norm before clipping."""

    def begin_iteration(self) -> None:
        """The weights as they are now are those that the iteration begins with."""

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of what is trained: weights by Hugging Face names in the run's dtype, or an adapter."""

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights."""

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of all that a later step depends on."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go back to a state."""


class TorchLearner:
    """One process, CPU or GPU. fp32 masters; bf16 runs compute in bf16 and publish bf16."""

    def __init__(self, model: str, spec: RunSpec) -> None:
        torch.set_num_threads(spec.trainer.threads)
        self.loss = loss = loss_of(spec)
        self._dtype = getattr(torch, spec.model.dtype)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._forward = forward.Forward(spec, self._device)
        self._model = forward.load(model, spec, self._device)
        self.vocabulary = int(self._model.config.vocab_size)
        self._adapter = Adapter(self._model, model, spec) if spec.model.lora else None
        self.base = self._adapter.base if self._adapter else None
        trained = self._adapter.named if self._adapter else dict(self._model.named_parameters())
        self._policy = Optimized(trained, spec, spec.algorithm.learning_rate)
        self._critic = Critic(model, spec, self._device, self._forward) if loss.critic else None
        self._reference: Any = None
        if loss.needs.reference and self._adapter and spec.loss.reference in (None, model):
            self._reference = self._adapter.off()
        elif loss.needs.reference:
            self._reference = forward.load(spec.loss.reference or model, spec, self._device)
            self._reference.requires_grad_(False)
        self._first: Any = None  # as the iteration began
        if loss.needs.before == "iteration" and self._adapter:
            self._first = self._adapter.kept()
        elif loss.needs.before == "iteration":
            self._first = forward.load(model, spec, self._device)
            self._first.requires_grad_(False)

    def begin_iteration(self) -> None:
        if self._first is not None:
            with torch.no_grad():
                now = self._policy.named
                for name, parameter in self._first.named_parameters():
                    parameter.copy_(now[name])

    @torch.no_grad()
    def score(self, rows: Sequence[Row], needs: Needs) -> list[Row]:
        batch = micro_batch(rows, None, self.loss, 0).to(self._device)
        ends = np.cumsum([row.sample.tokens.size for row in rows])[:-1]

        def parts(asked: bool, ask: Any) -> Sequence[np.ndarray | None]:
            return np.split(ask().float().cpu().numpy(), ends) if asked else [None] * len(rows)

        reference = parts(needs.reference, lambda: self._forward.logprobs(self._reference, batch))
        before_from = self._model if needs.before == "step" else self._first
        before = parts(needs.before != "no", lambda: self._forward.logprobs(before_from, batch))
        values = parts(needs.values, lambda: self._critic.values(batch))  # type: ignore[union-attr]
        return [
            replace(row, scores=Scores(*said))
            for row, said in zip(rows, zip(reference, before, values, strict=True), strict=True)
        ]

    def accumulate(self, batches: Sequence[MicroBatch]) -> list[LossStats]:
        return [self._accumulate(batch.to(self._device)) for batch in batches]

    def _accumulate(self, batch: MicroBatch) -> LossStats:
        total, stats = objective(self._forward.logprobs(self._model, batch), batch, self.loss)
        try:
            if not math.isfinite(stats.loss):
                raise NotFinite(f"the loss is {stats.loss}")
            total.backward()
            self._policy.accumulate()
            if self._critic is not None:
                wrong, returns = self._critic.accumulate(batch)
                stats = replace(stats, value_error=wrong, returns=returns)
        except NotFinite as error:
            error.rows = batch.rows
            raise
        return stats

    def step(self, total: float) -> float:
        norm = self._policy.step(total)
        if self._critic is not None:
            self._critic.trained.step(total)
        return norm

    def weights(self) -> dict[str, torch.Tensor]:
        dtype = torch.float32 if self._adapter else self._dtype  # an adapter is small, and is rounded once
        return {
            name: parameter.detach().to("cpu", dtype, copy=True)
            for name, parameter in self._policy.named.items()
        }

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._policy.adopt(weights)

    def state(self) -> dict[str, torch.Tensor]:
        state = self._policy.state() | {"rng": torch.get_rng_state()}
        if self._critic is not None:
            state |= {f"critic.{name}": value for name, value in self._critic.trained.state().items()}
        return state | (self._adapter.mark() if self._adapter else {})

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._adapter is not None:
            self._adapter.check(state)
        torch.set_rng_state(state["rng"])
        self._policy.restore(state)
        if self._critic is not None:
            prefix = "critic."
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            self._critic.trained.restore(own)

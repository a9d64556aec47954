"""The learner seam, and the learner on torch in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch.utils.checkpoint import checkpoint

from consumers import packing
from consumers.batching import MicroBatch
from consumers.loss import LossStats, policy_loss
from infra import cpu_linear
from schemas.runspec import RunSpec

# Fixed point: gradients of a micro-batch are multiples of 2^-32, and may reach 2^30 in sum.
_SCALE = 2.0**32
_LARGEST = 2.0**30
_WARM_ROWS = 2048  # micro-batches of up to so many tokens have their kernels before the first sample comes


class NotFinite(ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class Learner(Protocol):
    """Accumulates micro-batches, steps, and hands out weights and state."""

    vocabulary: int

    def accumulate(self, batch: MicroBatch) -> LossStats:
        """Add a micro-batch's gradient."""

    def step(self, normaliser: float) -> float:
        """Divide the gradient by `normaliser`, clip it, take an optimizer step; the norm before clipping."""

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the weights by Hugging Face names, in the run's dtype."""

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights."""

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of all that a later step depends on."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go back to a state."""


class TorchLearner:
    """One process, CPU or GPU. fp32 masters; bf16 runs compute in bf16 and publish bf16."""

    def __init__(self, model: str, spec: RunSpec) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(spec.trainer.threads)
        self._algorithm, self._trainer = spec.algorithm, spec.trainer
        self._temperature = spec.sampling.temperature
        self._dtype = getattr(torch, spec.model.dtype)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self._device)
        packing.use_in(self._model)
        if self._device.type == "cpu" and self._dtype == torch.float32 and cpu_linear.pays():
            cpu_linear.use_in(self._model, most_rows=min(spec.trainer.microbatch_tokens, _WARM_ROWS))
        self._model.eval()  # no dropout: the gradient is of the policy that is sampled
        self.vocabulary = int(self._model.config.vocab_size)
        self._named = dict(self._model.named_parameters())
        size = sum(parameter.numel() for parameter in self._named.values())
        self._gradient = torch.zeros(size, device=self._device)  # all gradients are views into it
        self._sum = (
            torch.zeros(size, dtype=torch.int64, device=self._device) if spec.trainer.exact_sums else None
        )
        self._attach_gradients()
        algorithm = spec.algorithm
        self._optimizer = torch.optim.AdamW(
            self._named.values(), lr=algorithm.learning_rate, betas=algorithm.betas,
            weight_decay=algorithm.weight_decay, fused=True,
        )  # fmt: skip
        self._steps = 0

    def _attach_gradients(self) -> None:
        start = 0
        for parameter in self._named.values():
            parameter.grad = self._gradient[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def accumulate(self, batch: MicroBatch) -> LossStats:
        batch = batch.to(self._device)
        logprobs = self._logprobs(batch)
        loss, stats = policy_loss(logprobs, batch, self._algorithm)
        if not math.isfinite(stats.loss):
            raise NotFinite(f"the loss is {stats.loss}")
        loss.backward()
        if self._sum is not None:
            if not bool(self._gradient.abs().max() < _LARGEST):
                raise NotFinite(
                    "a gradient is NaN, infinite or too large for exact sums (trainer.exact_sums)"
                )
            self._sum += (self._gradient * _SCALE).round_().to(torch.int64)
            self._gradient.zero_()
        return stats

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Logprob of each answer token."""
        with self._autocast():
            hidden = self._model.model(
                input_ids=batch.tokens[None], position_ids=batch.packing.positions[None],
                packing=batch.packing, use_cache=False,
            ).last_hidden_state[0]  # fmt: skip
            before = hidden.index_select(0, batch.answer - 1)  # the state that predicts each answer token
            targets = batch.tokens[batch.answer]
            parts = [
                self._chunk(states, wanted)
                for states, wanted in zip(
                    before.split(self._trainer.logits_chunk),
                    targets.split(self._trainer.logits_chunk),
                    strict=True,
                )
            ]
        return torch.cat(parts)

    def _chunk(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logprobs of some tokens; with more than one chunk, logits are made again on the way back."""
        if targets.numel() < self._trainer.logits_chunk:
            return self._gather(states, targets)
        return checkpoint(self._gather, states, targets, use_reentrant=False)

    def _gather(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self._model.lm_head(states).float()
        if self._temperature != 1.0:
            logits = logits / self._temperature
        return logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def _autocast(self) -> AbstractContextManager[object]:
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def step(self, normaliser: float) -> float:
        if self._sum is not None:
            self._gradient.copy_(self._sum.double().div_(_SCALE * normaliser))
            self._sum.zero_()
        else:
            self._gradient.div_(normaliser)
        norm = float(torch.linalg.vector_norm(self._gradient))
        if norm != norm or norm == float("inf"):
            raise NotFinite(f"the gradient's norm is {norm}")
        if norm > self._algorithm.max_grad_norm:
            self._gradient.mul_(self._algorithm.max_grad_norm / (norm + 1e-6))
        self._steps += 1
        warm = min(1.0, self._steps / max(1, self._algorithm.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = self._algorithm.learning_rate * warm
        self._optimizer.step()
        self._gradient.zero_()
        return norm

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.detach().to("cpu", self._dtype, copy=True)
            for name, parameter in self._named.items()
        }

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(weights[name])

    def state(self) -> dict[str, torch.Tensor]:
        state = {"steps": torch.tensor(self._steps), "rng": torch.get_rng_state()}
        for name, parameter in self._named.items():
            state[f"weights.{name}"] = parameter.detach().cpu().clone()
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"optimizer.{key}.{name}"] = value.detach().cpu().clone()
        return state

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._steps = int(state["steps"])
        torch.set_rng_state(state["rng"])
        self.adopt({name: state[f"weights.{name}"] for name in self._named})
        for name, parameter in self._named.items():
            kept = {
                key: state[f"optimizer.{key}.{name}"].clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"optimizer.{key}.{name}" in state
            }
            self._optimizer.state[parameter] = {
                key: value if key == "step" else value.to(self._device) for key, value in kept.items()
            }

"""Parameters that are trained: their gradient as one vector, its sum over micro-batches, and AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from consumers.rows import Row
from schemas.runspec import RunSpec

# Fixed point: gradients of a micro-batch are multiples of 2^-32, and may reach 2^30 in sum.
_SCALE = 2.0**32
_LARGEST = 2.0**30


class NotFinite(ArithmeticError):
    """A loss or a gradient is NaN or infinite; `rows`: of the micro-batch, if it was one."""

    rows: Sequence[Row] = ()


class Optimized:
    """Some parameters by name. `accumulate` after each backward, `step` when all is in."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter], spec: RunSpec, learning_rate: float) -> None:
        self.named = dict(named)
        self._algorithm, self._learning_rate = spec.algorithm, learning_rate
        device = next(iter(self.named.values())).device
        size = sum(parameter.numel() for parameter in self.named.values())
        self._gradient = torch.zeros(size, device=device)  # all gradients are views into it
        self._sum = torch.zeros(size, dtype=torch.int64, device=device) if spec.trainer.exact_sums else None
        start = 0
        for parameter in self.named.values():
            parameter.grad = self._gradient[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        algorithm = spec.algorithm
        self._optimizer = torch.optim.AdamW(
            self.named.values(), lr=learning_rate, betas=algorithm.betas, weight_decay=algorithm.weight_decay,
            fused=True,
        )  # fmt: skip
        self._steps = 0

    def accumulate(self) -> None:
        """Add the gradient of a micro-batch to the sum; with exact sums the order does not matter."""
        if self._sum is None:
            return
        if not bool(self._gradient.abs().max() < _LARGEST):
            raise NotFinite("a gradient is NaN, infinite or too large for exact sums (trainer.exact_sums)")
        self._sum += (self._gradient * _SCALE).round_().to(torch.int64)
        self._gradient.zero_()

    def step(self, total: float) -> float:
        """Divide the sum by `total`, clip it, step; returns the norm before clipping."""
        if self._sum is not None:
            self._gradient.copy_(self._sum.double().div_(_SCALE * total))
            self._sum.zero_()
        else:
            self._gradient.div_(total)
        norm = float(torch.linalg.vector_norm(self._gradient))
        if norm != norm or norm == float("inf"):
            raise NotFinite(f"the gradient's norm is {norm}")
        if norm > self._algorithm.max_grad_norm:
            self._gradient.mul_(self._algorithm.max_grad_norm / (norm + 1e-6))
        self._steps += 1
        warm = min(1.0, self._steps / max(1, self._algorithm.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * warm
        self._optimizer.step()
        self._gradient.zero_()
        return norm

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights."""
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(weights[name])

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of weights and optimizer."""
        state = {"steps": torch.tensor(self._steps)}
        for name, parameter in self.named.items():
            state[f"weights.{name}"] = parameter.detach().cpu().clone()
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"optimizer.{key}.{name}"] = value.detach().cpu().clone()
        return state

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go back to a state."""
        self._steps = int(state["steps"])
        self.adopt({name: state[f"weights.{name}"] for name in self.named})
        for name, parameter in self.named.items():
            self._optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                for key in ("step", "exp_avg", "exp_avg_sq")
                if (value := state.get(f"optimizer.{key}.{name}")) is not None
            }

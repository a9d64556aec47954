"""Parameters that are trained: their gradient as one vector, its sum over all micro-batches, and AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from consumers.batches.training_rows import TrainingRow
from consumers.learners import collective
from consumers.learners.fingerprint import NOTHING, Fingerprint, fingerprint
from consumers.learners.fixed_point import FixedPointSum
from consumers.learners.host_moments import MOMENTS, HostMoments
from schemas.runspec import RunSpec

_BITS = {2: torch.int16, 4: torch.int32}
_CHUNK = 1 << 12

Parts = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


class NotFinite(ArithmeticError):
    """A loss or a gradient is NaN or infinite.

    `rows`: the rows of the micro-batch that has it, if it was one; `batch`: its index in the call, or -1.
    """

    rows: Sequence[TrainingRow] = ()
    batch = -1


@dataclass(frozen=True)
class Stepped:
    """An optimizer step: the norm before clipping, and fingerprints if this learner takes any."""

    norm: float
    gradient: Fingerprint = NOTHING  # the mean over all samples, before clipping
    moments: Fingerprint = NOTHING
    weights: Fingerprint = NOTHING

    def beside(self, critic: Stepped) -> Stepped:
        """Return this step with the critic's: the vectors are both, the norm is the policy's."""
        return Stepped(
            self.norm, self.gradient.joined(critic.gradient), self.moments.joined(critic.moments),
            self.weights.joined(critic.weights),
        )  # fmt: skip


def rate_share(step: int, spec: RunSpec) -> float:
    """Return the factor of the learning rate at a step, for warm-up; steps are counted from 1."""
    return min(1.0, step / max(1, spec.algorithm.warmup_steps))


def _norm(vector: torch.Tensor) -> torch.Tensor:
    """Return the norm, by way of chunks: in one go fp32 loses 0.3 % over 50 million elements on a CPU."""
    whole = vector.numel() // _CHUNK * _CHUNK
    chunks = torch.linalg.vector_norm(vector[:whole].view(-1, _CHUNK), dim=1)
    return torch.linalg.vector_norm(torch.cat([chunks, vector[whole:]]))


def closest(master: torch.Tensor, published: torch.Tensor) -> torch.Tensor:
    """Return weights that round to exactly `published`: the master's where they do, else `published`."""
    if published.dtype == master.dtype:
        return published
    published, bits = published.to(master.device), _BITS[published.element_size()]
    same = master.to(published.dtype).view(bits) == published.view(bits)
    return torch.where(same, master, published.to(master.dtype))


class Trained(Protocol):
    """Parameters that are trained: see Optimized."""

    def accumulate(self) -> torch.Tensor | float:
        """Add a micro-batch's gradient; return what `check` takes."""

    def check(self, most: torch.Tensor | float) -> None:
        """Raise NotFinite if a gradient that was added is of no use."""

    def step(self, total: float) -> Stepped:
        """Divide the sum by `total`, clip it and step."""

    def adopt(self, weights: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Replace the weights."""

    def parts(self) -> Parts:
        """Return weights and optimizer state: what the next step changes, and what it does not."""

    def restore(self, state: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Restore a state."""


class Optimized:
    """Parameters by name and their AdamW. Call `accumulate` after each backward pass, `step` at the end.

    Each rank has all parameters; until the step it has the gradient of its own micro-batches only.
    """

    def __init__(self, named: Mapping[str, torch.nn.Parameter], spec: RunSpec, learning_rate: float) -> None:
        self.named = dict(named)
        self._spec, self._learning_rate = spec, learning_rate
        device = next(iter(self.named.values())).device
        size = sum(parameter.numel() for parameter in self.named.values())
        self._gradient = torch.zeros(size, device=device)  # the gradient of each parameter is a view into it
        self._sum = FixedPointSum(size, device) if spec.trainer.sums_exactly else None
        start = 0
        for parameter in self.named.values():
            parameter.grad = self._gradient[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        algorithm = spec.algorithm
        self._optimizer: torch.optim.AdamW | HostMoments
        if spec.trainer.offload_optimizer:
            self._optimizer = HostMoments(list(self.named.values()), algorithm)
        else:
            self._optimizer = torch.optim.AdamW(
                self.named.values(), lr=learning_rate, betas=algorithm.betas,
                weight_decay=algorithm.weight_decay, fused=True,
            )  # fmt: skip
        self._steps = 0

    def accumulate(self) -> torch.Tensor | float:
        """Add a micro-batch's gradient to the sum; with exact sums the order does not matter.

        Returns what `check` takes: on a GPU it is still being computed.
        """
        return self._sum.add(self._gradient) if self._sum is not None else 0.0

    def check(self, most: torch.Tensor | float) -> None:
        """Raise NotFinite if the sum can't hold a gradient that was added to it."""
        if self._sum is not None and not self._sum.fits(float(most)):
            raise NotFinite("a gradient is NaN, infinite or too large for exact sums (trainer.exact_sums)")

    def step(self, total: float) -> Stepped:
        """Divide the sum by `total`, clip it and step."""
        if self._sum is not None:
            self._sum.mean_into(self._gradient, total)
        else:
            collective.add_up(self._gradient)
            self._gradient.div_(total)
        norm = float(_norm(self._gradient))
        if norm != norm or norm == float("inf"):
            raise NotFinite(f"the gradient's norm is {norm}")
        gradient = fingerprint([self._gradient])
        most = self._spec.algorithm.max_grad_norm
        if norm > most:
            self._gradient.mul_(most / (norm + 1e-6))
        self._steps += 1
        moments = self._update()
        self._gradient.zero_()
        return Stepped(norm, gradient, moments, fingerprint(self.named.values()))

    def _update(self) -> Fingerprint:
        """Step the optimizer; return the fingerprint of its moments."""
        rate = self._learning_rate * rate_share(self._steps, self._spec)
        if isinstance(self._optimizer, HostMoments):
            return fingerprint(self._optimizer.step(rate), self._optimizer.size)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        state = self._optimizer.state
        none: dict[str, torch.Tensor] = {}  # of a parameter that some learner does not train
        every = (state.get(one, none).get(key) for one in self.named.values() for key in MOMENTS)
        return fingerprint([one for one in every if one is not None])

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Replace the weights. `prefix` stands before their names in `weights`."""
        for name, parameter in self.named.items():
            parameter.copy_(closest(parameter, weights[prefix + name]))

    def parts(self) -> Parts:
        """Return weights and optimizer state: what the next step changes, and what it does not."""
        live = {}
        for name, parameter in self.named.items():
            live[f"weights.{name}"] = parameter.detach()
            for key, value in self._optimizer.state.get(parameter, {}).items():
                live[f"optimizer.{key}.{name}"] = value.detach()
        return live, {"steps": torch.tensor(self._steps)}

    def restore(self, state: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Restore a state, tensor by tensor. `prefix` stands before all names in `state`."""
        copy = not getattr(state, "fresh", False)  # a tensor that was just read is used by nobody else
        self._steps = int(state[f"{prefix}steps"])
        self.adopt(state, f"{prefix}weights.")
        for name, parameter in self.named.items():
            found = {
                key: value
                for key in ("step", *MOMENTS)
                if (value := state.get(f"{prefix}optimizer.{key}.{name}")) is not None
            }
            if isinstance(self._optimizer, HostMoments):
                self._optimizer.restore(parameter, found)
            else:
                self._optimizer.state[parameter] = {
                    key: value.to(parameter.device, copy=copy) for key, value in found.items()
                }

"""The learner seam, what all learners have in common, and the one on torch.

Learner           what the trainer works with
├── LocalLearner  what one rank does
│   ├── TorchLearner       each rank has it all
│   └── DeepSpeedLearner   see deepspeed_learner.py
└── RankedLearner          hands work out to several of them, see ranked.py
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from consumers.batches.micro_batches import MicroBatch, micro_batch
from consumers.batches.training_rows import Scores, TrainingRow
from consumers.learners import collective, forward
from consumers.learners.critic import Critic
from consumers.learners.lending import Copies, Lent, MadeWeights
from consumers.learners.lora_adapter import Adapter
from consumers.learners.optimizing import NotFinite, Optimized, Parts
from consumers.learners.snapshot import StateSnapshot
from consumers.losses import loss_of
from consumers.losses.loss import Loss, Needs
from consumers.losses.objective import LossStats, objective
from schemas.runspec import RunSpec


class Learner(Protocol):
    """Accumulates micro-batches, steps, and hands out weights and state."""

    vocabulary: int
    loss: Loss
    base: str | None  # of an adapter: root of the model that it belongs to; none: all weights are trained

    def score(self, parts: Sequence[Sequence[TrainingRow]], needs: Needs) -> list[list[TrainingRow]]:
        """The rows of each part with what models that this step does not change say of them."""

    def accumulate(self, batches: Sequence[MicroBatch]) -> list[LossStats]:
        """Add the gradients of micro-batches."""

    def step(self, total: float) -> float:
        """Divide the gradient by `total`, clip it, take an optimizer step; the norm before clipping."""

    def begin_iteration(self) -> None:
        """The weights as they are now are those that the iteration begins with."""

    def made(self) -> MadeWeights:
        """Hashes of the weights as they are now, and a copy of them when it is asked for."""

    def snapshot(self) -> StateSnapshot:
        """The state as it is now, to be read by another thread; what changes before is copied first."""

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of what is trained: weights by Hugging Face names in the run's dtype, or an adapter."""

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights."""

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of all that a later step depends on; the same whichever learner it is of."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go back to a state, of any learner."""

    def close(self) -> None:
        """Let go of other processes."""


def unscored(rows: Sequence[TrainingRow], loss: Loss) -> MicroBatch:
    """Samples that are scored together, and with no others."""
    return micro_batch(rows, None, loss, 0)


def with_scores(rows: Sequence[TrainingRow], said: Scores) -> list[TrainingRow]:
    """Rows with what was said of all their tokens, end to end."""
    ends = np.cumsum([row.sample.tokens.size for row in rows])[:-1]
    parts = [
        [None] * len(rows) if one is None else np.split(one, ends)
        for one in (said.reference, said.before, said.values)
    ]
    return [
        replace(row, scores=Scores(*each)) for row, each in zip(rows, zip(*parts, strict=True), strict=True)
    ]


class LocalLearner(ABC):
    """What one rank does: forward and backward over its micro-batches, and its part of each step.

    What `weights` and `state` return counts on rank 0 alone; on the others it is empty.
    """

    lockstep = False  # all ranks must compute equally many micro-batches

    def __init__(self, model: str, spec: RunSpec) -> None:
        torch.set_num_threads(spec.trainer.threads)
        self.loss = loss = loss_of(spec)
        self._spec = spec
        self._dtype = getattr(torch, spec.model.dtype)
        self._device = collective.device()
        self._forward = forward.Forward(spec, self._device)
        self._model = forward.load_policy(model, spec, self._device)
        self.vocabulary = int(self._model.config.vocab_size)
        self._adapter = Adapter(self._model, model, spec) if spec.model.lora else None
        self.base = self._adapter.base if self._adapter else None
        self._named: dict[str, torch.nn.Parameter] = (
            self._adapter.named if self._adapter else dict(self._model.named_parameters())
        )
        self._critic = Critic(model, spec, self._device, self._forward) if loss.critic else None
        self._reference: Any = None
        if loss.needs.reference and self._adapter and spec.loss.reference in (None, model):
            self._reference = self._adapter.off()
        elif loss.needs.reference:
            self._reference = forward.load_policy(spec.loss.reference or model, spec, self._device)
            self._reference.requires_grad_(False)
        self._first: Any = None  # as the iteration began
        if loss.needs.before == "iteration" and self._adapter:
            self._first = self._adapter.kept()
        elif loss.needs.before == "iteration":
            self._first = forward.load_policy(model, spec, self._device)
            self._first.requires_grad_(False)
        self._lent = Lent()
        published = torch.float32 if self._adapter else self._dtype  # an adapter is small: rounded once
        self._copies = Copies(published, self._lent)

    @abstractmethod
    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """The policy's, of each drawn token."""

    @abstractmethod
    def _backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch's loss."""

    @abstractmethod
    def step(self, total: float) -> float:
        """See Learner."""

    @abstractmethod
    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See Learner."""

    @abstractmethod
    def _policy_parts(self) -> Parts:
        """Weights and optimizer: what the next step changes, and what it does not."""

    @abstractmethod
    def _restore_policy(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go back to weights and optimizer."""

    def _whole(self, parameter: torch.nn.Parameter) -> AbstractContextManager[object]:
        """While a parameter is read, by all ranks."""
        return nullcontext()

    def begin_iteration(self) -> None:
        if self._first is not None:
            with torch.no_grad():
                for name, parameter in self._first.named_parameters():
                    with self._whole(self._named[name]):
                        parameter.copy_(self._named[name])

    def score(self, parts: Sequence[Sequence[TrainingRow]], needs: Needs) -> list[list[TrainingRow]]:
        return [with_scores(rows, self.ask(unscored(rows, self.loss), needs)) for rows in parts]

    @torch.no_grad()
    def ask(self, batch: MicroBatch, needs: Needs) -> Scores:
        """What models say of each drawn token of a micro-batch."""
        batch = batch.to(self._device)
        reference = before = values = None
        if needs.reference:
            reference = self._forward.logprobs(self._reference, batch)
        if needs.before == "step":
            before = self._logprobs(batch)
        elif needs.before == "iteration":
            before = self._forward.logprobs(self._first, batch)
        if needs.values:
            assert self._critic is not None
            values = self._critic.values(batch)
        return Scores(
            *(None if one is None else one.float().cpu().numpy() for one in (reference, before, values))
        )

    def accumulate(self, batches: Sequence[MicroBatch]) -> list[LossStats]:
        found = []
        for number, batch in enumerate(batches):
            try:
                found.append(self._accumulate(batch.to(self._device)))
            except NotFinite as error:
                error.rows, error.batch = batch.rows, number
                raise
        return found

    def _accumulate(self, batch: MicroBatch) -> LossStats:
        self._forward.entropy()  # of what was scored
        total, stats = objective(self._logprobs(batch), batch, self.loss)
        entropy, tokens = self._forward.entropy()
        stats = replace(stats, entropy=entropy, entropy_tokens=tokens)
        if not math.isfinite(stats.loss):
            raise NotFinite(f"the loss is {stats.loss}")
        self._backward(total)
        if self._critic is not None and batch.returns is not None:
            wrong, returns = self._critic.accumulate(batch)
            stats = replace(stats, value_error=wrong, returns=returns)
        return stats

    def _here(self) -> bool:
        """Whether all parameters lie whole in this machine's memory."""
        return self._device.type == "cpu"

    def _shapes(self) -> dict[str, Sequence[int]]:
        """Of the whole parameters."""
        return {name: parameter.shape for name, parameter in self._named.items()}

    def made(self) -> MadeWeights:
        if self._here():
            return self._copies.live(self._named)
        return self._copies.at_once(self._bring, self._shapes())

    def _bring(self, copies: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._named.items():
            with self._whole(parameter):
                if collective.rank_number() == 0:
                    copies[name].copy_(parameter.detach())

    def weights(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self._named.items():
            with self._whole(parameter):
                if collective.rank_number() == 0:
                    found[name] = parameter.detach().to("cpu", self._copies.dtype, copy=True)
        return found

    def parts(self) -> Parts:
        """The state: what the next step changes, and what it does not. All ranks take part."""
        live, own = self._policy_parts()
        if self._critic is not None:
            for all_, some in zip((live, own), self._critic.trained.parts(), strict=True):
                all_ |= {f"critic.{name}": value for name, value in some.items()}
        own["rng"] = torch.get_rng_state()
        return live, own | (self._adapter.mark() if self._adapter is not None else {})

    def snapshot(self) -> StateSnapshot:
        taken = StateSnapshot(*self.parts(), deadline_s=self._spec.deadlines.progress_s)
        self._lent.add(taken)
        return taken

    def state(self) -> dict[str, torch.Tensor]:
        live, own = self.parts()
        if collective.rank_number() != 0:
            return {}
        return {name: value.to("cpu", copy=True) for name, value in live.items()} | own

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._lent.settle()
        if self._adapter is not None:
            self._adapter.check(state)
        torch.set_rng_state(state["rng"])
        self._restore_policy(state)
        if self._critic is not None:
            self._critic.trained.restore(state, "critic.")

    def close(self) -> None:
        """See Learner."""
        self._copies.close()


class TorchLearner(LocalLearner):
    """CPU or GPU. fp32 masters; bf16 runs compute in bf16 and publish bf16."""

    def __init__(self, model: str, spec: RunSpec) -> None:
        super().__init__(model, spec)
        self._policy = Optimized(self._named, spec, spec.algorithm.learning_rate)

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        return self._forward.logprobs(self._model, batch)

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._policy.accumulate()

    def step(self, total: float) -> float:
        self._lent.settle()
        norm = self._policy.step(total)
        if self._critic is not None:
            self._critic.trained.step(total)
        return norm

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._lent.settle()
        self._policy.adopt(weights)

    def _policy_parts(self) -> Parts:
        return self._policy.parts()

    def _restore_policy(self, state: Mapping[str, torch.Tensor]) -> None:
        self._policy.restore(state)

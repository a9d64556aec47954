"""The Learner protocol, the part that all learners have in common, and the learner on torch.

Learner           the interface that the trainer works with
├── LocalLearner  the work of one rank
│   ├── OptimizingLearner
│   │   ├── TorchLearner     each rank holds all weights and all optimizer state
│   │   └── ShardedLearner   see sharded.py
│   └── DeepSpeedLearner     see zero.py
└── RankedLearner          deals work out to several LocalLearners, see ranks/ranked_learner.py
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from consumers.batches.micro_batches import MicroBatch, micro_batch
from consumers.batches.training_rows import Scores, TrainingRow
from consumers.learners import collective, forward
from consumers.learners.critic import AddedReturns, Critic, whole_critic
from consumers.learners.frozen_loading import load_frozen
from consumers.learners.lending import Copies, Lent, MadeWeights
from consumers.learners.lora_adapter import Adapter
from consumers.learners.optimizing import NotFinite, Optimized, Parts, Stepped, Trained
from consumers.learners.repeatable import named_if_not_repeatable, repeat_sums
from consumers.learners.snapshot import PartPlace, StateSnapshot
from consumers.losses.loss import Loss, Needs, loss_of
from consumers.losses.objective import LossStats, Measured, objective
from infra.end_tokens import end_tokens
from schemas.runspec import RunSpec


class Learner(Protocol):
    """Accumulates gradients of micro-batches, takes optimizer steps, and hands out weights and state."""

    vocabulary: int
    loss: Loss
    base: str | None  # root of the model that an adapter belongs to; None: all weights are trained

    def score(self, parts: Sequence[Sequence[TrainingRow]], needs: Needs) -> list[list[TrainingRow]]:
        """Return the rows of each part with the scores that `needs` names."""

    def accumulate(self, batches: Sequence[MicroBatch]) -> list[LossStats]:
        """Add the gradients of micro-batches; return the stats of each."""

    def step(self, total: float) -> Stepped:
        """Divide the gradient by `total`, clip it, step the optimizer."""

    def begin_iteration(self) -> None:
        """Remember the current weights as those that the iteration begins with."""

    def made(self) -> MadeWeights:
        """Return hashes of the current weights, and a function that copies the weights."""

    def snapshot(self, place: PartPlace | None = None) -> StateSnapshot:
        """Return the current state for another thread to read; tensors are copied before they change.

        If ranks share the state out, this is rank 0's part, and the others write theirs at `place`.
        """

    def check(self) -> None:
        """Raise if a rank that would still have to write its part of a state has ended. For any thread."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Copy what is trained: weights by Hugging Face names in the run's dtype, or an adapter."""

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of all that a later step depends on, in a form that is the same for all learners."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state that any learner returned."""

    def rest(self) -> None:
        """Give back memory that is not in use, since engines on this machine draw now."""

    def close(self) -> None:
        """End the learner's threads and other processes."""


def unscored(rows: Sequence[TrainingRow], loss: Loss) -> MicroBatch:
    """Return a micro-batch of samples that are scored together, and with no others."""
    return micro_batch(rows, None, loss, 0)


def with_scores(rows: Sequence[TrainingRow], said: Scores) -> list[TrainingRow]:
    """Return rows with their scores. `said` has the scores of all their tokens, end to end."""
    ends = np.cumsum([row.sample.tokens.size for row in rows])[:-1]
    parts = [
        [None] * len(rows) if one is None else np.split(one, ends)
        for one in (said.reference, said.before, said.values)
    ]
    return [
        replace(row, scores=Scores(*each)) for row, each in zip(rows, zip(*parts, strict=True), strict=True)
    ]


@dataclass(frozen=True)
class _Begun:
    """A micro-batch whose gradient is added, or will be when the GPU comes to it."""

    measured: Measured
    entropy: tuple[torch.Tensor | float, int]  # and of how many tokens
    most: torch.Tensor | float  # the gradient's largest magnitude
    critic: AddedReturns | None


@contextmanager
def _naming(number: int, batch: MicroBatch) -> Iterator[None]:
    """Add to an error which micro-batch it is of."""
    try:
        yield
    except NotFinite as error:
        error.rows, error.batch = batch.rows, number
        raise


def _check_loss(loss: float) -> None:
    if not math.isfinite(loss):
        raise NotFinite(f"the loss is {loss}")


class LocalLearner(ABC):
    """One rank's learner: forward and backward passes over its micro-batches, and its part of each step.

    `weights` and `state` return their result on rank 0, and an empty dict on the other ranks.
    """

    lockstep = False  # whether all ranks must compute equally many micro-batches
    scores_in_lockstep = False  # whether all of them must score equally many, whichever model scores
    shares_state = False  # whether each rank's snapshot is a part of the state, and each reads its own part

    @named_if_not_repeatable()
    def __init__(self, model: str, spec: RunSpec) -> None:
        torch.set_num_threads(spec.trainer.threads)
        self.loss = loss = loss_of(spec)
        self._spec = spec
        self._dtype = getattr(torch, spec.model.dtype)
        self._device = collective.device()
        if spec.trainer.sums_exactly:
            repeat_sums(self._device)
        barred = end_tokens(model) if spec.sampling.min_tokens else []
        self._forward = forward.Forward(spec, self._device, barred)
        self._adapter: Adapter | None = None
        if spec.model.lora:
            self._model, self._adapter = self._with_adapter(model)
        else:
            self._model = self._loaded(model, trained=True)
        self.vocabulary = int(self._model.config.vocab_size)
        self.base = self._adapter.base if self._adapter else None
        self._named: dict[str, torch.nn.Parameter] = (
            self._adapter.named if self._adapter else self._parameters(self._model)
        )
        self._critic: Critic | None = None
        if loss.critic:
            self._critic = self._made_critic(model)
        self._reference: Any = None
        if loss.needs.reference and self._adapter and spec.loss.reference in (None, model):
            self._reference = self._adapter.off()
        elif loss.needs.reference:
            self._reference = self._frozen(spec.loss.reference or model)
        self._first: Any = None  # the policy as the iteration began
        if loss.needs.before == "iteration" and self._adapter:
            self._first = self._adapter.kept()
        elif loss.needs.before == "iteration":
            self._first = self._loaded(model, trained=False)
        self._lent = Lent()
        published = torch.float32 if self._adapter else self._dtype  # an adapter is small: not rounded here
        turns = spec.placement.takes_turns
        self._copies = Copies(published, self._lent, self._device, turns=turns)

    def _loaded(self, folder: str, *, trained: bool) -> Any:
        """Return the model in a folder, or this rank's part of it."""
        model = forward.load_policy(folder, self._spec, self._device)
        return model.requires_grad_(trained)

    def _frozen(self, folder: str) -> Any:
        """Likewise, of a model that is never trained."""
        return load_frozen(folder, self._spec, self._device)

    def _with_adapter(self, folder: str) -> tuple[Any, Adapter]:
        """Return the model in a folder, which is not trained, and the adapter that it has got."""
        model = self._frozen(folder)
        return model, Adapter(model, folder, self._spec)

    def _parameters(self, model: Any) -> dict[str, torch.nn.Parameter]:
        """Return a loaded model's parameters by Hugging Face names."""
        return dict(model.named_parameters())

    def _made_critic(self, folder: str) -> Critic:
        return whole_critic(folder, self._spec, self._device, self._forward)

    def _logprobs_by(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Return the logprob that a loaded model gives each drawn token."""
        return self._forward.logprobs(model, batch)

    @abstractmethod
    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Return the policy's logprob of each drawn token."""

    @abstractmethod
    def _backward(self, loss: torch.Tensor) -> torch.Tensor | float:
        """Add the gradient of a micro-batch's loss; return what `_check` takes."""

    @abstractmethod
    def _check(self, most: torch.Tensor | float) -> None:
        """Raise NotFinite if a gradient that was added is of no use."""

    @abstractmethod
    def step(self, total: float) -> Stepped:
        """See Learner."""

    @abstractmethod
    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See Learner."""

    @abstractmethod
    def _policy_parts(self) -> Parts:
        """Return weights and optimizer state: what the next step changes, and what it does not."""

    @abstractmethod
    def _restore_policy(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore weights and optimizer state."""

    def _whole(self, parameter: torch.nn.Parameter) -> AbstractContextManager[object]:
        """Return a context in which all ranks can read the whole parameter."""
        return nullcontext()

    def begin_iteration(self) -> None:
        if self._first is not None:
            with torch.no_grad():
                for name, parameter in self._first.named_parameters():
                    with self._whole(self._named[name]):
                        parameter.copy_(self._named[name])

    def score(self, parts: Sequence[Sequence[TrainingRow]], needs: Needs) -> list[list[TrainingRow]]:
        return [with_scores(rows, self.ask(unscored(rows, self.loss), needs)) for rows in parts]

    @named_if_not_repeatable()
    @torch.no_grad()
    def ask(self, batch: MicroBatch, needs: Needs) -> Scores:
        """Return the scores that `needs` names for each drawn token of a micro-batch."""
        batch = batch.to(self._device)
        reference = before = values = None
        if needs.reference:
            # The reference is a policy of its own, and takes the experts that it likes.
            reference = self._logprobs_by(self._reference, replace(batch, routes=()))
        if needs.before == "step":
            before = self._logprobs(batch)
        elif needs.before == "iteration":
            before = self._logprobs_by(self._first, batch)
        if needs.values:
            assert self._critic is not None
            values = self._critic.values(batch)
        return Scores(
            *(None if one is None else one.float().cpu().numpy() for one in (reference, before, values))
        )

    def accumulate(self, batches: Sequence[MicroBatch]) -> list[LossStats]:
        begun, found = list[_Begun](), list[LossStats]()
        for number, batch in enumerate(batches):
            with _naming(number, batch):
                begun.append(self._begin(batch.to(self._device)))
        # Only now is a GPU waited for: else it would have nothing to do while its next work is prepared.
        for number, (one, batch) in enumerate(zip(begun, batches, strict=True)):
            with _naming(number, batch):
                found.append(self._ended(one, batch))
        return found

    @named_if_not_repeatable()
    def _begin(self, batch: MicroBatch) -> _Begun:
        """Add the gradient of a micro-batch. On a GPU nothing is known of it yet."""
        self._forward.entropy()  # drop the entropy of what was scored
        total, measured = objective(self._logprobs(batch), batch, self.loss)
        entropy = self._forward.entropy()
        if self._device.type != "cuda":
            _check_loss(float(total.detach()))
        most, critic = self._backward(total), None
        if self._critic is not None and batch.returns is not None:
            critic = self._critic.accumulate(batch)
        return _Begun(measured, entropy, most, critic)

    def _ended(self, begun: _Begun, batch: MicroBatch) -> LossStats:
        stats, (entropy, tokens) = begun.measured.stats(batch), begun.entropy
        _check_loss(stats.loss)
        self._check(begun.most)
        wrong = returns = 0.0
        if begun.critic is not None:
            assert self._critic is not None
            wrong, returns = self._critic.ended(begun.critic)
        return replace(
            stats, entropy=float(entropy), entropy_tokens=tokens, value_error=wrong, returns=returns
        )

    def _here(self) -> bool:
        """Return whether all parameters are whole in this machine's main memory."""
        return self._device.type == "cpu"

    def _shapes(self) -> dict[str, Sequence[int]]:
        """Return the shapes of the whole parameters."""
        return {name: parameter.shape for name, parameter in self._named.items()}

    def made(self) -> MadeWeights:
        if self._here():
            return self._copies.live(self._named)
        return self._copies.at_once(self._bring, self._shapes())

    def _bring(self, copies: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._named.items():
            with self._whole(parameter):
                if collective.rank_number() == 0:
                    copies[name].copy_(parameter.detach().to(self._copies.dtype), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def weights(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self._named.items():
            with self._whole(parameter):
                if collective.rank_number() == 0:
                    found[name] = parameter.detach().to("cpu", self._copies.dtype, copy=True)
        return found

    def parts(self) -> Parts:
        """Return the state: what the next step changes, and what it does not. All ranks take part."""
        live, own = self._policy_parts()
        if self._critic is not None:
            for all_, some in zip((live, own), self._critic.trained.parts(), strict=True):
                all_ |= {f"critic.{name}": value for name, value in some.items()}
        own["rng"] = torch.get_rng_state()
        return live, own | (self._adapter.mark() if self._adapter is not None else {})

    def snapshot(self, place: PartPlace | None = None) -> StateSnapshot:
        taken = StateSnapshot(*self.parts(), deadline_s=self._spec.deadlines.progress_s)
        self._lent.add(taken)
        return taken

    def check(self) -> None:  # noqa: B027
        """See Learner."""

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

    def rest(self) -> None:
        """See Learner. Weights and optimizer state stay; on a GPU, torch's free blocks go back to it."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """See Learner."""
        self._copies.close()


class OptimizingLearner(LocalLearner):
    """A learner that adds up gradients and steps its optimizer itself."""

    _policy: Trained

    def _backward(self, loss: torch.Tensor) -> torch.Tensor | float:
        loss.backward()
        return self._policy.accumulate()

    def _check(self, most: torch.Tensor | float) -> None:
        self._policy.check(most)

    def step(self, total: float) -> Stepped:
        self._lent.settle()
        taken = self._policy.step(total)
        self._copies.stepped()
        return taken if self._critic is None else taken.beside(self._critic.trained.step(total))

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._lent.settle()
        self._policy.adopt(weights)

    def _policy_parts(self) -> Parts:
        return self._policy.parts()

    def _restore_policy(self, state: Mapping[str, torch.Tensor]) -> None:
        self._policy.restore(state)


class TorchLearner(OptimizingLearner):
    """The learner on CPU or GPU. Weights are kept in fp32; bf16 runs compute in bf16 and publish bf16."""

    def __init__(self, model: str, spec: RunSpec) -> None:
        super().__init__(model, spec)
        self._policy = Optimized(self._named, spec, spec.algorithm.learning_rate)

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        return self._forward.logprobs(self._model, batch)

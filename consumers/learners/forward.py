"""Run a transformers model over a micro-batch: logprobs of its drawn tokens, or hidden states before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from consumers.batches import packing
from consumers.batches.micro_batches import MicroBatch
from consumers.fused import fused_logprobs
from consumers.fused.chosen_rows import chosen_rows
from consumers.fused.fused_layers import Fitted, use_fused_layers
from consumers.learners.expert_routing import (
    follow,
    make_followers,
    shape_of_routers,
    wrong_routers,
)
from consumers.learners.long_rope import choose_frequencies
from infra import cpu_linear
from infra.errors import Explained
from infra.quiet import no_model_bars
from infra.route_shapes import shape_in
from schemas.runspec import RunSpec

_WARM_ROWS = 2048  # kernels for micro-batches of up to so many tokens are made before the first sample comes
_NEAR = 1e-3  # tolerance, as a share of the largest logit
_EVERY = 8  # entropy is taken of one token in so many: of all it would cost as much as logprobs


class UnsupportedModel(Explained):
    """A model that would be trained wrongly, or not at all; the message says why."""

    lasting = True


def load_policy(folder: str, spec: RunSpec, device: torch.device) -> Any:
    """Load a causal language model in fp32, ready to run over micro-batches. Raises UnsupportedModel."""
    from transformers import AutoModelForCausalLM

    no_model_bars()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    adapt(model, folder)
    make_ready(model, spec, device)
    return model


def adapt(model: Any, folder: str) -> Fitted:
    """Have a model take packed sequences, on fused layers where they fit; return which do.

    Raises UnsupportedModel if it then computes something else.
    """
    with _without_tf32():
        expected = _as_it_is(model)
        packing.use_packed_attention(model)
        fitted = use_fused_layers(model)
        _check(model, expected, folder)
    return fitted


def make_ready(model: Any, spec: RunSpec, device: torch.device) -> None:
    """Have an adapted model compute as the run file says. It needs no weights yet."""
    choose_frequencies(model, spec.longest_sample)
    if spec.model.follow_routes:
        check_routers(model)
        make_followers(model)
    if device.type == "cpu" and spec.model.dtype == "float32" and cpu_linear.pays():
        cpu_linear.use_cpu_linear(model, most_rows=min(spec.trainer.microbatch_tokens, _WARM_ROWS))
    model.eval()  # no dropout, and no noise in routers
    if spec.trainer.gradient_checkpointing:
        compute_layers_again(model)


def compute_layers_again(model: Any) -> None:
    """Have a model's layers computed again on the backward pass. It computes what it does in eval mode.

    transformers does this in training mode only, in which some layers have dropout (OPT, Seed-OSS) or routers
    that add noise (Mixtral). The policy that is sampled has neither. So a layer is in that mode where
    transformers asks for it, and not while the layer itself is computed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise UnsupportedModel(
            f"trainer.gradient_checkpointing: {type(model).__name__} can't compute its layers again; set it "
            "to false"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True
        layer.forward = MethodType(_as_sampled, layer)  # a copy of the model gets a method of its own


def _as_sampled(self: Any, *given: Any, **named: Any) -> Any:
    self.training = False
    try:
        return type(self).forward(self, *given, **named)
    finally:
        self.training = True


def call_head_once(head: Any) -> None:
    """Have a head be called once for a micro-batch, as a module, however many chunks its logits are made in.

    ZeRO-3 needs that: it compares among ranks which modules were called, and their micro-batches differ.
    """
    head.computes, head.is_called_once = head.forward, True  # on some CPUs it has a forward of its own
    head.forward = MethodType(_lent_to, head)


def _lent_to(self: Any, states: torch.Tensor, use: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
    found: torch.Tensor = self.computes(states) if use is None else use(self.computes, states)
    return found


def check_routers(model: Any) -> None:
    """Raise UnsupportedModel unless a mixture's routers can follow, and are those that its config names."""
    wrong, found, said = wrong_routers(model), shape_of_routers(model), shape_in(model.config.to_dict())
    if not wrong and found != said:
        wrong = f"its layers have {found or 'no routers'}, and its config tells of {said or 'no experts'}"
    if wrong:
        raise UnsupportedModel(
            f"model.path: {type(model).__name__} can't follow the generators' routes: {wrong}. Set "
            "model.follow_routes: false"
        )


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute products of fp32 in fp32, so that two ways to compute the same come close to each other."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _probes(model: Any) -> list[torch.Tensor]:
    """Return two sequences of different lengths, on which a model is tried."""
    return [torch.arange(length, device=model.device) % model.config.vocab_size for length in (5, 9)]


@torch.no_grad()
def _as_it_is(model: Any) -> torch.Tensor:
    """Return the logits that transformers itself computes, sequence by sequence."""
    return torch.cat([model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in _probes(model)])


@torch.no_grad()
def _check(model: Any, expected: torch.Tensor, folder: str) -> None:
    """Raise unless layers and head, over packed sequences, compute the same logits as the whole model.

    Some models scale their logits after the head, or combine tokens otherwise than by attention.
    """
    probes, name = _probes(model), type(model).__name__
    packed = packing.pack_sequences([len(tokens) for tokens in probes]).to(model.device)
    filling = packed.positions.shape[0] - packed.tokens
    tokens = torch.cat([*probes, probes[0].new_zeros(filling)])
    try:
        found = model.lm_head(_states(model, tokens, packed)[: packed.tokens])
    except (AttributeError, TypeError) as error:
        raise UnsupportedModel(
            f"model.path {folder}: {name} can't be trained: its layers must be at `model`, its head at "
            f"`lm_head`, and its attention must be that of transformers everywhere ({error})"
        ) from error
    apart = float((found - expected).abs().max())
    if not apart <= _NEAR * max(1.0, float(expected.abs().max())):
        raise UnsupportedModel(
            f"model.path {folder}: {name} can't be trained: the trainer runs its layers and its head over "
            f"packed sequences, and comes to logits that differ by {apart:.3g} from the model's own"
        )


def _states(model: Any, tokens: torch.Tensor, packed: packing.Packing) -> torch.Tensor:
    """Return the last layer's output for each token."""
    found: torch.Tensor = model.model(
        input_ids=tokens[None], position_ids=packed.positions[None], packing=packed, use_cache=False
    ).last_hidden_state[0]
    return found


class Forward:
    """Runs the models of one run over micro-batches, in the run's dtype and at its temperature.

    `barred`: tokens that have no probability among the first `sampling.min_tokens` tokens of an answer.
    """

    def __init__(self, spec: RunSpec, device: torch.device, barred: Sequence[int] = ()) -> None:
        self._min_tokens = spec.sampling.min_tokens if barred else 0
        self._barred = torch.tensor(list(barred), dtype=torch.long, device=device)
        self._dtype, self._device = getattr(torch, spec.model.dtype), device
        self._temperature, self._rows = spec.sampling.temperature, spec.trainer.logits_chunk
        self._follows = spec.model.follow_routes
        self._entropy: list[torch.Tensor] = []
        self._entropy_tokens = 0

    def states(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Return for each drawn token the hidden state that predicts it."""
        with self.autocast():
            return chosen_rows(_states(model, batch.tokens, batch.packing), batch.answer - 1)

    def logprobs(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Return the logprob of each drawn token. The backward pass computes full chunks of logits again.

        A mixture's tokens take the experts of the micro-batch's routes, if it has any.
        """
        if self._follows:
            follow(model, batch, self._device)
        targets, early = batch.tokens[batch.answer], self._early(batch)
        with self.autocast():
            states = self.states(model, batch)
            if fused_logprobs.takes_head(model.lm_head, states):
                return self._fused(model.lm_head.weight, states, targets, early)
            if getattr(model.lm_head, "is_called_once", False):
                found: torch.Tensor = model.lm_head(states, use=partial(self._chunks, targets, early))
                return found
            return self._chunks(targets, early, model.lm_head, states)

    def _chunks(
        self, targets: torch.Tensor, early: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor],
        states: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the logprobs of tokens. `head`: returns logits; it is called for each chunk."""
        chunks = (one.split(self._rows) for one in (states, targets, early))
        parts = [
            self._gather(head, *chunk)
            if chunk[1].numel() < self._rows
            else checkpoint(self._gather, head, *chunk, use_reentrant=False)
            for chunk in zip(*chunks, strict=True)
        ]
        return torch.cat(parts)

    def _fused(
        self, weight: torch.Tensor, states: torch.Tensor, targets: torch.Tensor, early: torch.Tensor
    ) -> torch.Tensor:
        found, entropies = fused_logprobs.fused_logprobs(
            states, weight, targets, temperature=self._temperature, rows=self._rows,
            barred=self._barred if self._min_tokens else self._barred[:0], early=early,
        )  # fmt: skip
        some = entropies[::_EVERY]
        self._entropy.append(some.sum())
        self._entropy_tokens += len(some)
        return found

    def _early(self, batch: MicroBatch) -> torch.Tensor:
        """Return for each drawn token whether it is among the first `min_tokens` of its answer."""
        owner = batch.owner
        if not self._min_tokens:
            return owner.new_zeros(owner.shape, dtype=torch.bool)
        place = torch.arange(len(owner), device=owner.device) - torch.searchsorted(owner, owner)
        return place < self._min_tokens

    def _gather(
        self, head: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, targets: torch.Tensor,
        early: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        logits = head(states).float()
        if self._temperature != 1.0:
            logits = logits / self._temperature
        if self._min_tokens:
            logits = self._without_ends(logits, targets, early)
        every = logits.log_softmax(-1)
        some = every.detach()[::_EVERY]
        if self._min_tokens:
            some = some.clamp_min(torch.finfo(some.dtype).min)  # 0 times infinity would be no number
        self._entropy.append(-(some.exp() * some).sum())
        self._entropy_tokens += len(some)
        return every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def _without_ends(self, logits: torch.Tensor, targets: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        """Return logits by which early tokens are none of the barred ones, as the generator draws them.

        A sample that has one there all the same was not drawn so. It gets a finite logprob, which differs
        from the one that it came with; an infinite one would end the run.
        """
        barred = self._barred
        masked = early[:, None] & (targets[:, None] != barred)
        return logits.index_copy(1, barred, logits[:, barred].masked_fill(masked, -torch.inf))

    def entropy(self) -> tuple[torch.Tensor | float, int]:
        """Return the summed entropy of about every eighth token since the last call, and their number."""
        found = sum(self._entropy), self._entropy_tokens
        self._entropy, self._entropy_tokens = [], 0
        return found

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context for forward passes: bf16 runs compute in bf16 on fp32 weights."""
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

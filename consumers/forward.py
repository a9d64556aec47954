"""A transformers model over a micro-batch: logprobs of its drawn tokens, or the states before them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from consumers import packing
from consumers.batching import MicroBatch
from infra import cpu_linear
from schemas.runspec import RunSpec

_WARM_ROWS = 2048  # micro-batches of up to so many tokens have their kernels before the first sample comes


def load(folder: str, spec: RunSpec, device: torch.device) -> Any:
    """A causal language model in fp32, ready to be run over micro-batches."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    packing.use_in(model)
    if device.type == "cpu" and spec.model.dtype == "float32" and cpu_linear.pays():
        cpu_linear.use_in(model, most_rows=min(spec.trainer.microbatch_tokens, _WARM_ROWS))
    if spec.trainer.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # the gradient is of the policy that is sampled
        model.train()  # or nothing is checkpointed
    else:
        model.eval()  # no dropout, likewise
    return model


class Forward:
    """How a run's models are run."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self._dtype, self._device = getattr(torch, spec.model.dtype), device
        self._temperature, self._rows = spec.sampling.temperature, spec.trainer.logits_chunk

    def states(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Of each drawn token the hidden state that predicts it."""
        with self.autocast():
            hidden = model.model(
                input_ids=batch.tokens[None], position_ids=batch.packing.positions[None],
                packing=batch.packing, use_cache=False,
            ).last_hidden_state[0]  # fmt: skip
            return hidden.index_select(0, batch.answer - 1)

    def logprobs(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Of each drawn token; with more than one chunk, logits are made again on the way back."""
        targets = batch.tokens[batch.answer]
        with self.autocast():
            states = self.states(model, batch)
            parts = [
                self._gather(model, some, wanted)
                if wanted.numel() < self._rows
                else checkpoint(self._gather, model, some, wanted, use_reentrant=False)
                for some, wanted in zip(states.split(self._rows), targets.split(self._rows), strict=True)
            ]
        return torch.cat(parts)

    def _gather(self, model: Any, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(states).float()
        if self._temperature != 1.0:
            logits = logits / self._temperature
        return logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 runs compute in bf16 on fp32 weights."""
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

"""The run's model as transformers itself computes it: a second opinion on log-probabilities.

It has nothing of the trainer's code, so it also finds faults there. It can be asked what a generator would
have said that had another version of the weights, another temperature, or read another prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from consumers.batches.training_rows import TrainingRow
from infra.quiet import no_model_bars


def answer_tokens(row: TrainingRow) -> tuple[list[int], list[int]]:
    """Return the tokens of a sample's prompt and answer."""
    return row.sample.prompt_tokens.tolist(), row.sample.tokens.tolist()


NamedWeights = Mapping[str, torch.Tensor]


class OwnModel:
    """A causal language model in fp32."""

    def __init__(self, folder: str, temperature: float) -> None:
        from transformers import AutoModelForCausalLM

        no_model_bars()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._temperature = temperature
        head, embeddings = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        self.is_tied = head is not None and head.weight is embeddings.weight

    def load(self, weights: NamedWeights) -> None:
        """Take weights."""
        self._model.load_state_dict({name: one.float() for name, one in weights.items()}, strict=False)
        self._model.tie_weights()

    @torch.no_grad()
    def logprobs(
        self, prompt: Sequence[int], answer: Sequence[int], *, temperature: float | None = None,
        head: torch.Tensor | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Return the log-probability of each token of an answer. `head`: an output layer to use instead."""
        tokens = torch.tensor([[*prompt, *answer]])
        states = self._model.model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        return self._said(states[len(prompt) - 1 : -1], answer, temperature, head)

    @torch.no_grad()
    def rounding(self, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
        """Return by how much each log-probability changes if all products are rounded to bf16."""
        with torch.autocast("cpu", torch.bfloat16):
            rounded = self.logprobs(prompt, answer)
        return np.abs(rounded - self.logprobs(prompt, answer))

    @torch.no_grad()
    def after_prompt_of(
        self, older: NamedWeights, newer: NamedWeights, prompt: Sequence[int], answer: Sequence[int]
    ) -> np.ndarray:
        """Return the same, if the prompt's keys and values were made by older weights."""
        self.load(older)
        cache = self._model.model(input_ids=torch.tensor([list(prompt[:-1])]), use_cache=True).past_key_values
        self.load(newer)
        states = self._model.model(
            input_ids=torch.tensor([[prompt[-1], *answer[:-1]]]), past_key_values=cache, use_cache=True
        ).last_hidden_state[0]
        return self._said(states, answer, None, None)

    def _said(
        self,
        states: torch.Tensor,
        answer: Sequence[int],
        temperature: float | None,
        head: torch.Tensor | None,
    ) -> np.ndarray:
        layer = self._model.get_output_embeddings()
        logits = layer(states) if head is None else states @ head.float().T
        every = (logits.float() / (temperature or self._temperature)).log_softmax(-1)
        found: np.ndarray = every[torch.arange(len(answer)), torch.tensor(list(answer))].numpy()
        return found

    @property
    def count(self) -> int:
        """Number of the model's weights."""
        return sum(one.numel() for one in self._model.parameters())

    @property
    def head(self) -> torch.Tensor:
        """A copy of the output layer as it is now."""
        found: torch.Tensor = self._model.get_output_embeddings().weight.detach().clone()
        return found

"""The run's model as transformers itself computes it: a second opinion on log-probabilities.

It has nothing of the trainer's code but that by which a mixture's routers follow routes, so it also finds
faults there. It can be asked what a generator would have said that had another version of the weights,
another temperature, or read another prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from consumers.batches.training_rows import TrainingRow
from consumers.learners.expert_routing import NO_EXPERT, make_followers, set_routes
from consumers.learners.long_rope import choose_frequencies
from infra.quiet import no_model_bars
from infra.weights.weights_error import WeightsError
from schemas.expert_routes import unpack_routes
from schemas.shortening import printable


@dataclass(frozen=True)
class RoutedAnswer:
    """The tokens of a sample, with the experts that its generator took for them."""

    prompt: Sequence[int]
    answer: Sequence[int]
    routes: np.ndarray | None = None  # of all tokens but the last, [tokens, layers, experts]; None: no record

    @staticmethod
    def of(row: TrainingRow) -> RoutedAnswer:
        """Return the tokens and routes of a sample."""
        sample = row.sample
        tokens = sample.prompt_tokens.size + sample.tokens.size
        routes = unpack_routes(sample.routes, tokens - 1).astype(np.int16) if sample.routes else None
        return RoutedAnswer(sample.prompt_tokens.tolist(), sample.tokens.tolist(), routes)

    def with_prompt(self, before: Sequence[int], behind: Sequence[int]) -> RoutedAnswer:
        """Return the same answer to a longer prompt. The experts of new tokens are not known."""
        routes, count = self.routes, len(self.prompt)
        if routes is not None:
            ahead, past = (
                np.full((len(new), *routes.shape[1:]), NO_EXPERT, np.int16) for new in (before, behind)
            )
            routes = np.concatenate([ahead, routes[:count], past, routes[count:]])
        return replace(self, prompt=[*before, *self.prompt, *behind], routes=routes)


NamedWeights = Mapping[str, torch.Tensor]


class OwnModel:
    """A causal language model in fp32."""

    def __init__(self, folder: str, temperature: float, *, longest: int = 1, follows: bool = False) -> None:
        """`longest`: tokens of a sample that the run may have.

        `follows`: a mixture's tokens take the experts that their generator took, as the trainer's do.
        """
        from transformers import AutoModelForCausalLM

        no_model_bars()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        choose_frequencies(self._model, longest)
        self._temperature, self._follows = temperature, follows
        if follows:
            make_followers(self._model)
        head, embeddings = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        self.is_tied = head is not None and head.weight is embeddings.weight

    def load(self, weights: NamedWeights) -> None:
        """Take weights. All others stay as they are: an adapter changes some layers alone.

        Raises WeightsError if the model has no weight of a name.
        """
        if unknown := sorted(weights.keys() - self._model.state_dict().keys()):
            raise WeightsError(
                f"the weights are of another model: {type(self._model).__name__} has no "
                f"{printable(', '.join(unknown), 400)}"
            )
        self._model.load_state_dict({name: one.float() for name, one in weights.items()}, strict=False)
        self._model.tie_weights()

    def round_to(self, dtype: str) -> None:
        """Round all weights to a type of numbers, such as bfloat16."""
        kind = getattr(torch, dtype)
        weights = self._model.state_dict().items()
        self.load({name: one.to(kind) for name, one in weights if one.is_floating_point()})

    @torch.no_grad()
    def logprobs(
        self, read: RoutedAnswer, *, temperature: float | None = None, head: torch.Tensor | None = None
    ) -> np.ndarray:
        """Return the log-probability of each token of an answer. `head`: an output layer to use instead."""
        tokens = [*read.prompt, *read.answer]
        states = self._layers(tokens, read.routes, use_cache=False).last_hidden_state[0]
        return self._said(states[len(read.prompt) - 1 : -1], read.answer, temperature, head)

    def _layers(self, tokens: Sequence[int], routes: np.ndarray | None, **more: Any) -> Any:
        """Run the layers below the head over some tokens, of which the first ones have these routes."""
        if self._follows and routes is not None:
            all_routes = np.full((len(tokens), *routes.shape[1:]), NO_EXPERT, np.int16)
            all_routes[: len(routes)] = routes
            set_routes(self._model, torch.from_numpy(all_routes))
        elif self._follows:
            set_routes(self._model, None)
        return self._model.model(input_ids=torch.tensor([list(tokens)]), **more)

    @torch.no_grad()
    def rounding(self, read: RoutedAnswer) -> np.ndarray:
        """Return by how much each log-probability changes if all products are rounded to bf16."""
        with torch.autocast("cpu", torch.bfloat16):
            rounded = self.logprobs(read)
        return np.abs(rounded - self.logprobs(read))

    @torch.no_grad()
    def after_prompt_of(self, older: NamedWeights, newer: NamedWeights, read: RoutedAnswer) -> np.ndarray:
        """Return the same, if the prompt's keys and values were made by older weights."""
        first = len(read.prompt) - 1  # tokens that those weights have read
        of_prompt, of_rest = (None, None) if read.routes is None else np.split(read.routes, [first])
        self.load(older)
        cache = self._layers(read.prompt[:first], of_prompt, use_cache=True).past_key_values
        self.load(newer)
        rest = [read.prompt[first], *read.answer[:-1]]
        states = self._layers(rest, of_rest, past_key_values=cache, use_cache=True).last_hidden_state[0]
        return self._said(states, read.answer, None, None)

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

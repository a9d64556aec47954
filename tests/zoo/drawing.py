"""A generator of the zoo: transformers' own model, token by token, with the log-probabilities of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

END = 1


@dataclass(frozen=True)
class Drawn:
    """One answer."""

    tokens: np.ndarray
    logprobs: np.ndarray
    finish: str


class Drawing:
    """Draws answers from the weights that it was given last."""

    def __init__(self, folder: str, *, temperature: float, max_tokens: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.temperature, self.max_tokens = temperature, max_tokens

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take weights."""
        self.model.load_state_dict({name: one.float() for name, one in weights.items()}, strict=False)
        self.model.tie_weights()

    @torch.no_grad()
    def draw(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Drawn]:
        """Draw an answer to each prompt; prompts of one length are drawn together."""
        found: dict[int, Drawn] = {}
        for length in {len(prompt) for prompt in prompts}:
            mine = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            answers = self._together([prompts[n] for n in mine], [seeds[n] for n in mine])
            found |= zip(mine, answers, strict=True)
        return [found[number] for number in range(len(prompts))]

    def _together(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Drawn]:
        draws = [np.random.default_rng(seed) for seed in seeds]
        tokens, start = torch.tensor(prompts), len(prompts[0])
        said: list[list[float]] = [[] for _ in prompts]
        open_ = [True] * len(prompts)
        for _ in range(self.max_tokens):
            logprobs = self.next_logprobs(tokens)
            chosen = [
                int(draw.choice(len(p), p=p / p.sum()))
                for draw, p in zip(draws, logprobs.exp().double().numpy(), strict=True)
            ]
            for row, token in enumerate(chosen):
                if open_[row]:
                    said[row].append(float(logprobs[row, token]))
            tokens = torch.cat([tokens, torch.tensor(chosen)[:, None]], 1)
            open_ = [one and token != END for one, token in zip(open_, chosen, strict=True)]
            if not any(open_):
                break
        return [
            Drawn(
                tokens[row, start : start + len(one)].numpy().astype(np.int32), np.array(one, np.float32),
                "stop" if int(tokens[row, start + len(one) - 1]) == END else "length",
            )
            for row, one in enumerate(said)
        ]  # fmt: skip

    def next_logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the next token of each row."""
        logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits[:, -1]
        return (logits / self.temperature).log_softmax(-1)

"""Seeded sampling without torch generators: one draw a token, from a hash of the seed and the position.

So a sample's randomness depends on its seed alone, and not on its neighbours in the batch, on preemption, or
on which engine continues it. One vectorised inverse-CDF draw replaces a Python loop over torch generators.
There is no state to wind back, which is what breaks vLLM's seeded requests on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a float64 in [0, 1) for each (seed, position): the splitmix64 sequence of each seed."""
    with np.errstate(over="ignore"):
        state = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def own_id(internal: str) -> str:
    """Return a request's id as we gave it: vLLM appends a dash and 8 random characters."""
    return internal[:-9]


class StreamSampler(torch.nn.Module):
    """Replaces vLLM's top-k/top-p sampler, and keeps the log-probability of each drawn token.

    The first `min_tokens` tokens of an answer are none of `barred`: those have no probability there.
    """

    def __init__(self, min_tokens: int = 0, barred: Sequence[int] = ()) -> None:
        super().__init__()
        self._min_tokens, self._barred = (min_tokens if barred else 0), list(barred)
        self.batch: Any = None  # the model runner's input batch
        self._seeds: dict[str, int] = {}
        self._before: dict[str, int] = {}  # tokens that other engines drew
        self._logprobs: dict[str, list[float]] = {}

    def open(self, request: str, seed: int, before: int = 0) -> None:
        """Begin a request; `before`: how many tokens it has from other engines."""
        self._seeds[request], self._before[request] = seed, before
        self._logprobs[request] = []

    def close(self, request: str) -> list[float]:
        """End a request. Return its log-probabilities."""
        self._seeds.pop(request)
        self._before.pop(request)
        return self._logprobs.pop(request)

    def forward(
        self, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> tuple[torch.Tensor, None]:
        """Draw a token for each row of logits, which the temperature is already applied to."""
        rows = logits.shape[0]
        requests = [own_id(internal) for internal in self.batch.req_ids[:rows]]
        positions = [len(tokens) for tokens in self.batch.req_output_token_ids[:rows]]
        seeds = np.array([self._seeds.get(request, 0) for request in requests], dtype=np.uint64)
        before = np.array([self._before.get(request, 0) for request in requests])
        if self._min_tokens:
            early = np.flatnonzero(before + positions < self._min_tokens)
            logits[torch.from_numpy(early).to(logits.device)[:, None], self._barred] = -torch.inf
        draws = torch.from_numpy(uniforms(seeds, before + positions)).to(logits.device)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        mass = logprobs.double().exp_().cumsum(dim=-1)
        tokens = torch.searchsorted(mass, (draws * mass[:, -1]).unsqueeze(1), right=True)
        tokens.clamp_(max=logits.shape[-1] - 1)
        chosen = logprobs.gather(1, tokens).squeeze(1).tolist()
        for request, position, logprob in zip(requests, positions, chosen, strict=True):
            kept = self._logprobs.get(request)
            if kept is not None:
                del kept[position:]  # tokens drawn while the prompt was not whole do not count
                kept.append(logprob)
        return tokens.squeeze(1), None

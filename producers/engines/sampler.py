"""Seeded sampling without torch generators: one draw a token, from a hash of the seed and the position.

So a sample's randomness depends on its seed alone, and not on its neighbours in the batch, on preemption, or
on which engine continues it. One vectorised inverse-CDF draw replaces a Python loop over torch generators.
There is no state to wind back, which is what breaks vLLM's seeded requests on a CPU.
"""

from __future__ import annotations

import itertools
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
        tokens, logprobs = self._draw(logits, np.arange(rows), np.zeros(rows, dtype=np.int64))
        for row, logprob in enumerate(logprobs.tolist()):
            self._keep(row, [logprob])
        return tokens, None

    def verify(
        self, logits: torch.Tensor, rows: np.ndarray, aheads: np.ndarray, drafts: np.ndarray
    ) -> list[list[int]]:
        """Draw a token for each row of logits. Return each request's next tokens.

        Row `n` follows the tokens of request `rows[n]` and the first `aheads[n]` of its draft; `drafts[n]` is
        the draft's next token, or -1. Each token is drawn with the number of its own position, so a draft
        says only which rows are of use: those up to the first whose drawn token is not the draft's.
        """
        tokens, logprobs = self._draw(logits, rows, aheads)
        drawn, kept = tokens.cpu().numpy(), logprobs.cpu().numpy()
        starts = np.flatnonzero(aheads == 0).tolist()
        found = []
        for request, (start, end) in enumerate(itertools.pairwise([*starts, rows.size])):
            wrong = np.flatnonzero(
                drawn[start:end] != drafts[start:end]
            )  # the last row has no draft: never empty
            end = start + int(wrong[0]) + 1
            self._keep(request, kept[start:end].tolist())
            found.append(drawn[start:end].tolist())
        return found

    def _draw(
        self, logits: torch.Tensor, rows: np.ndarray, aheads: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token for each row, so many tokens after a request's last. Return also their logprobs."""
        count = int(rows[-1]) + 1
        requests = [own_id(internal) for internal in self.batch.req_ids[:count]]
        made = np.array([len(tokens) for tokens in self.batch.req_output_token_ids[:count]])
        seeds = np.array([self._seeds.get(request, 0) for request in requests], dtype=np.uint64)
        before = np.array([self._before.get(request, 0) for request in requests])
        positions = (before + made)[rows] + aheads
        if self._min_tokens:
            early = np.flatnonzero(positions < self._min_tokens)
            logits[torch.from_numpy(early).to(logits.device)[:, None], self._barred] = -torch.inf
        draws = torch.from_numpy(uniforms(seeds[rows], positions)).to(logits.device)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        mass = logprobs.double().exp_().cumsum(dim=-1)
        tokens = torch.searchsorted(mass, (draws * mass[:, -1]).unsqueeze(1), right=True)
        tokens.clamp_(max=logits.shape[-1] - 1)
        return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)

    def _keep(self, row: int, logprobs: list[float]) -> None:
        """Keep the log-probabilities of the next tokens of the request in a row of the batch."""
        kept = self._logprobs.get(own_id(self.batch.req_ids[row]))
        if kept is not None:
            del kept[len(self.batch.req_output_token_ids[row]) :]  # drawn while the prompt was not whole
            kept += logprobs

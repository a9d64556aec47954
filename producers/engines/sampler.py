"""Seeded sampling without torch generators: one draw a token, from a hash of the seed and the position.

So a sample's randomness depends on its seed alone, and not on its neighbours in the batch, on preemption, or
on which engine continues it. One vectorised inverse-CDF draw replaces a Python loop over torch generators.
There is no state to wind back, which is what breaks vLLM's seeded requests on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from infra import choices
from infra.sending import sent
from producers.engines.open_requests import OpenRequests

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

    The first `min_tokens` tokens of an answer are none of `barred`: those have no probability there. On a GPU
    `forward` only begins its work: vLLM may schedule a step before the tokens of the one before are known.
    """

    def __init__(
        self, min_tokens: int = 0, barred: Sequence[int] = (), requests: OpenRequests | None = None
    ) -> None:
        super().__init__()
        self._min_tokens = min_tokens if barred else 0
        self._barred = torch.tensor(barred, dtype=torch.int64)
        self._requests = requests or OpenRequests()
        self.batch: Any = None  # the model runner's input batch
        self.watch: Callable[[], None] = lambda: None  # called in each step, when the logits are there
        self._ids: list[str] = []  # of the batch's rows, as they were last
        self._slots = np.zeros(0, np.int64)  # of these rows

    def open(self, request: str, seed: int, before: int = 0) -> None:
        """Begin a request; `before`: how many tokens it has from other engines."""
        self._requests.open(request, seed, before)
        self._ids = []

    def drawn(self, request: str) -> int:
        """Return how many tokens were drawn for a request, with one that vLLM has not taken in yet."""
        return self._requests.drawn(request)

    def close(self, request: str, tokens: int | None = None) -> np.ndarray:
        """End a request. Return the log-probabilities of its first tokens, by default of all."""
        self._ids = []
        return self._requests.close(request, tokens)

    def drop(self, request: str) -> None:
        """End a request whose log-probabilities nobody wants."""
        self._ids = []
        self._requests.drop(request)

    def forward(
        self, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> tuple[torch.Tensor, None]:
        """Draw a token for each row of logits, which the temperature is already applied to."""
        slots, made = self._rows(logits.shape[0])
        tokens, logprobs = self._draw(logits, slots, made)
        self._requests.put(slots, made, logprobs)
        return tokens, None

    def verify(
        self, logits: torch.Tensor, rows: np.ndarray, aheads: np.ndarray, drafts: np.ndarray
    ) -> list[list[int]]:
        """Draw a token for each row of logits. Return each request's next tokens.

        Row `n` follows the tokens of request `rows[n]` and the first `aheads[n]` of its draft; `drafts[n]` is
        the draft's next token, or -1. Each token is drawn with the number of its own position, so a draft
        says only which rows are of use: those up to the first whose drawn token is not the draft's.
        """
        slots, made = self._rows(int(rows[-1]) + 1)
        slots, at = slots[rows], made[rows] + aheads
        tokens, logprobs = self._draw(logits, slots, at)
        drawn = tokens.cpu().numpy()
        starts = np.flatnonzero(aheads == 0).tolist()
        found, kept = [], np.zeros(rows.size, dtype=bool)
        for start, end in itertools.pairwise([*starts, rows.size]):
            wrong = np.flatnonzero(
                drawn[start:end] != drafts[start:end]
            )  # the last row has no draft: never empty
            end = start + int(wrong[0]) + 1
            kept[start:end] = True
            found.append(drawn[start:end].tolist())
        self._requests.put(slots[kept], at[kept], logprobs.cpu()[torch.from_numpy(kept)])
        return found

    def _rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of the batch's requests, and how many tokens each has from here.

        A token that is drawn and not known yet counts: vLLM puts a -1 in its place.
        """
        self.watch()
        ids = self.batch.req_ids[:count]
        if ids != self._ids:
            self._slots = np.array([self._requests.slot(own_id(one)) for one in ids], dtype=np.int64)
            self._ids = ids
        made = map(len, self.batch.req_output_token_ids[:count])
        return self._slots, np.fromiter(made, np.int64, count)

    def _draw(
        self, logits: torch.Tensor, slots: np.ndarray, at: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw token `at` of the request in each slot. Return also the logprobs."""
        positions = self._requests.before[slots] + at
        if self._min_tokens and (early := np.flatnonzero(positions < self._min_tokens)).size:
            self._barred = self._barred.to(logits.device)
            logits[sent(torch.from_numpy(early), logits.device)[:, None], self._barred] = -torch.inf
        draws = sent(torch.from_numpy(uniforms(self._requests.seeds[slots], positions)), logits.device)
        if logits.is_cuda and choices.FUSED.forced() != "off":
            from producers.engines.gpu_draw import drawn_there

            return drawn_there(logits, draws)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        mass = logprobs.double().exp_().cumsum(dim=-1)
        tokens = torch.searchsorted(mass, (draws * mass[:, -1]).unsqueeze(1), right=True)
        tokens.clamp_(max=logits.shape[-1] - 1)
        return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)

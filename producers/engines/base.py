"""The engine seam: what a generator needs of whatever makes the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from infra.errors import Explained


class EngineError(Explained):
    """The engine can't do what is asked."""


@dataclass(frozen=True, slots=True)
class Request:
    """A sample to be made."""

    id: str
    prompt: Sequence[int]
    max_tokens: int
    seed: int
    priority: float  # longest first: the predicted length


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished sample."""

    id: str
    tokens: np.ndarray  # int32
    logprobs: np.ndarray  # float32, of each token at the sampling temperature
    finish: str  # "stop" or "length"


class Engine(Protocol):
    """Makes samples, one decode step of all running ones at a time."""

    def submit(self, request: Request) -> None:
        """Take a request; it runs as soon as a slot is free."""

    def step(self) -> list[Finished]:
        """One decode step; what finished in it."""

    def unfinished(self) -> dict[str, int]:
        """The requests that are not finished, and how many tokens each has."""

    def abort(self, ids: Sequence[str]) -> None:
        """Forget requests."""

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights between two steps; running samples go on with the new ones."""

    def held_digests(self) -> dict[str, str]:
        """Hash of each tensor that the engine now computes with, by Hugging Face names."""

"""The engine seam: what a generator needs of whatever makes the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

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
    made: Sequence[int] = ()  # tokens that it has already: another engine made them


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A sample as far as an engine has made it."""

    id: str
    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished sample."""

    id: str
    tokens: np.ndarray  # int32; those that this engine made
    logprobs: np.ndarray  # float32, of each token at the sampling temperature
    finish: str  # "stop" or "length"


@dataclass(frozen=True, slots=True)
class Installed:
    """What an engine holds after its weights were replaced, between two decode steps."""

    digests: Mapping[str, str]  # hash of each tensor that it now computes with, by Hugging Face names
    tokens: Mapping[str, int]  # the samples it has not finished, and how many tokens each has


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a decode step at some batch sizes, ascending."""

    batches: list[int]
    seconds: list[float]


class Engine(Protocol):
    """Makes samples, one decode step of all running ones at a time."""

    def submit(self, request: Request) -> None:
        """Take a request; it runs as soon as a slot is free."""

    def step(self, wait_s: float) -> list[Finished]:
        """One decode step; what finished in it. An engine that steps by itself: what finished in `wait_s`."""

    def unfinished(self) -> dict[str, int]:
        """How many tokens each request has that is not finished, as far as is known."""

    def abort(self, ids: Sequence[str]) -> None:
        """Forget requests."""

    def hand_over(self, ids: Sequence[str]) -> list[Unfinished]:
        """Forget requests, and say how far those of them are that it has."""

    def install(self, weights: bytes | bytearray, *, recompute: bool) -> Installed:
        """Take the weights of a safetensors file between two steps; running samples go on with them.

        `recompute`: what the old weights computed of these samples (the KV cache) is computed anew.
        """

    def pace(self) -> Pace:
        """How long its steps take, lately."""

    def close(self) -> None:
        """Let go of what it holds."""

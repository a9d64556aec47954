"""The engine seam: what a generator needs of whatever makes the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from infra.errors import Explained
from infra.weights.patch import PatchFile


class EngineError(Explained):
    """The engine can't do what is asked."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
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
class FinishedRequest:
    """A finished sample."""

    id: str
    tokens: np.ndarray  # int32; those that this engine made
    logprobs: np.ndarray  # float32, of each token at the sampling temperature
    finish: str  # "stop" or "length"


@dataclass(frozen=True, slots=True)
class Installed:
    """New weights are in an engine, between two decode steps."""

    tokens: Mapping[str, int]  # the samples that it has not finished, and how many tokens each has
    pause_s: float  # in which it made none


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a decode step at some batch sizes, ascending."""

    batches: list[int]
    seconds: list[float]


class Decoder(Protocol):
    """Makes samples, one decode step of all running ones at a time."""

    def submit(self, request: SampleRequest) -> None:
        """Take a request; it runs as soon as a slot is free."""

    def step(self, wait_s: float) -> list[FinishedRequest]:
        """One decode step; what finished in it. An engine that steps by itself: what finished in `wait_s`."""

    def unfinished(self) -> dict[str, int]:
        """How many tokens each request has that is not finished, as far as is known."""

    def abort(self, ids: Sequence[str]) -> None:
        """Forget requests."""

    def hand_over(self, ids: Sequence[str]) -> list[Unfinished]:
        """Forget requests, and say how far those of them are that it has."""

    def pace(self) -> Pace:
        """How long its steps take, lately."""

    def close(self) -> None:
        """Let go of what it holds."""


class Engine(Decoder, Protocol):
    """A decoder that takes new weights."""

    def prepare(self, patch: PatchFile) -> None:
        """Get ready to take new weights, beside decoding; others that were prepared are forgotten."""

    def is_ready(self) -> bool:
        """Whether all is prepared."""

    def install(self, *, recompute: bool) -> Installed:
        """Take what is prepared, between two steps; running samples go on with it.

        `recompute`: what the old weights computed of these samples (the KV cache) is computed anew.
        """

    def digests(self) -> Mapping[str, str] | None:
        """Hash of each tensor that it computes with, by Hugging Face names; None: not known yet.

        They are found beside decoding after each install.
        """

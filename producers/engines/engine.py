"""The interface between a generator and its engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import numpy as np

from infra.errors import Explained
from infra.weights.patch import Patch, PatchFile
from schemas.generation import ENGINES, GeneratorSection
from schemas.runspec import RunSpec


class EngineError(Explained):
    """The engine failed, or can't do what is asked."""


def lasting_error(message: str) -> EngineError:
    """Return an error that another start would meet, too."""
    error = EngineError(message)
    error.lasting = True
    return error


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to make a sample."""

    id: str
    prompt: Sequence[int]
    max_tokens: int
    seed: int
    priority: float  # the predicted length; the longest come first
    made: Sequence[int] = ()  # tokens that other engines have made already
    # to measure steps: nothing but `max_tokens` ends it, and it is computed whole, as far as the engine can
    endless: bool = False


@dataclass(frozen=True, slots=True)
class DrawnAnswer:
    """The tokens that this engine drew for a request."""

    id: str
    tokens: np.ndarray  # int32; without those that other engines had drawn before
    logprobs: np.ndarray  # float32, of each token at the sampling temperature
    finish: str = ""  # "stop" or "length"; empty if the answer is not finished
    # of the prompt's and all the answer's tokens but the last, [tokens, layers, experts taken], ascending;
    # None: the model has no experts, or their routes are not recorded
    routes: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Installed:
    """The result of installing new weights between two decode steps."""

    tokens: Mapping[str, int]  # unfinished samples, with their numbers of tokens
    pause_s: float  # for which decoding paused


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds for one token of each sample, at some batch sizes, ascending.

    `keeps_bits`: whether a sample has the same bits if this engine continues it for another one. `drafted`:
    tokens that were guessed, by an engine that does so, and computed along with others. `accepted`: those of
    them that were right. `shared`: tokens, mostly of prompts, that were not computed since they had been for
    another sample.
    """

    batches: list[int]
    seconds: list[float]
    keeps_bits: bool = False
    drafted: int = 0
    accepted: int = 0
    shared: int = 0

    def line(self) -> tuple[float, float]:
        """Return the curve as a line through its ends: seconds of a step, and further ones a sample.

        Both are 0 while nothing is known.
        """
        if not self.batches:
            return 0.0, 0.0
        least, most = self.batches[0], self.batches[-1]
        slope = (self.seconds[-1] - self.seconds[0]) / (most - least) if most > least else 0.0
        slope = max(0.0, min(slope, self.seconds[-1] / most))
        return self.seconds[-1] - slope * most, slope


@dataclass(frozen=True, slots=True)
class FarRanksAsked:
    """The run and the generator whose engine has ranks on other machines: they find it through the store."""

    store: str  # URL
    run: str
    generator: int  # its number


class Decoder(Protocol):
    """Makes samples. Each decode step makes a token of each running sample, or several."""

    def submit(self, request: SampleRequest) -> None:
        """Take a request. It runs as soon as a slot is free."""

    def step(self, wait_s: float) -> list[DrawnAnswer]:
        """Make one decode step, and return the samples that finished in it.

        An engine in another process steps by itself: then wait for finished samples for at most `wait_s`
        seconds.
        """

    def unfinished(self) -> dict[str, int]:
        """Return the unfinished requests with their last known numbers of tokens."""

    def abort(self, ids: Sequence[str]) -> None:
        """Drop requests."""

    def hand_over(self, ids: Sequence[str]) -> list[DrawnAnswer]:
        """Drop requests, and return their tokens so far. Unknown requests are left out."""

    def pace(self) -> Pace:
        """Return how long recent steps took, by batch size."""

    def close(self) -> None:
        """End the engine."""


class Engine(Decoder, Protocol):
    """A decoder that takes new weights."""

    def prepare(self, patch: PatchFile) -> None:
        """Prepare new weights while decoding goes on. Weights that were prepared before are dropped."""

    def is_ready(self) -> bool:
        """Whether the weights are prepared."""

    def install(self, *, recompute: bool) -> Installed:
        """Install the prepared weights between two steps. Running samples go on with them.

        `recompute`: whether the KV cache of running samples, which the old weights made, is computed anew.
        """

    def rest(self) -> None:
        """Draw nothing from now on. Returns when the engine rests; running samples stay where they are."""

    def go_on(self) -> None:
        """End the rest."""

    def digests(self) -> Mapping[str, str] | None:
        """Return the hash of each tensor in the engine, by Hugging Face names; None: not known yet.

        After each install the hashes are computed while decoding goes on.
        """


class LocalEngine(Decoder, Protocol):
    """An engine in this process.

    `prepare` and `digests` take long, and are called in a thread beside its steps.
    """

    def prepare(self, patch: Patch) -> None:
        """Prepare new weights. Called in the thread beside steps."""

    def install(self, *, recompute: bool) -> dict[str, int]:
        """Install the prepared weights between two steps. Return the tokens of each unfinished sample."""

    def digests(self) -> dict[str, str]:
        """Return the hash of each tensor in the engine. Called in the thread beside steps."""


@runtime_checkable
class SleepingEngine(Protocol):
    """A local engine that can free the learner's GPU while it rests. Others keep their memory."""

    def sleep(self) -> None:
        """Free memory. Running samples are kept, and may be computed anew later."""

    def wake(self) -> None:
        """Take the memory again."""


class EngineSettings(GeneratorSection, ABC):
    """The settings of an engine. A file that adds an engine extends this class."""

    def for_generator(self, number: int) -> Self:
        """Return the settings of one generator: by default all have the same."""
        return self

    @abstractmethod
    def make(self, model: str, spec: RunSpec) -> LocalEngine:
        """Return the engine with the model in a folder. Called in the engine process."""

    def make_with_far_ranks(self, model: str, spec: RunSpec, far: FarRanksAsked) -> LocalEngine:
        """Return the engine as `make` does, with some of its ranks on other machines."""
        raise lasting_error(
            f"placement.engine_ranks: engine {self.engine} has no ranks on other machines: set elsewhere: 0"
        )


def engine_of(model: str, spec: RunSpec, far: FarRanksAsked | None = None) -> LocalEngine:
    """Return the engine that the run file names. `far`: set if some of its ranks are on other machines."""
    settings = ENGINES.loaded(spec.generator)
    assert isinstance(settings, EngineSettings)
    return settings.make(model, spec) if far is None else settings.make_with_far_ranks(model, spec, far)

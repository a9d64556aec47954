"""For an engine of your own: see docs/extending/engine.md."""

from __future__ import annotations

from infra.end_tokens import end_tokens
from infra.weights.bits import model_of
from infra.weights.digest import digests_of
from infra.weights.patch import Patch
from producers.engines.engine import (
    DrawnAnswer,
    EngineError,
    EngineSettings,
    LocalEngine,
    Pace,
    SampleRequest,
)
from producers.engines.pace import StepTimes
from producers.engines.sampler import uniforms
from producers.stopping import Stopping, stopping_of
from schemas.runspec import RunSpec

__all__ = [
    "DrawnAnswer",
    "EngineError",
    "EngineSettings",
    "LocalEngine",
    "Pace",
    "Patch",
    "RunSpec",
    "SampleRequest",
    "StepTimes",
    "Stopping",
    "digests_of",
    "end_tokens",
    "model_of",
    "stopping_of",
    "uniforms",
]

"""For an engine of your own: see docs/extending/engine.md."""

from __future__ import annotations

from infra.weights.bits import model_of
from infra.weights.digest import digests_of
from infra.weights.patch import Patch
from producers.engines.engine import (
    EngineError,
    EngineSettings,
    FinishedRequest,
    LocalEngine,
    Pace,
    SampleRequest,
    Unfinished,
)
from producers.engines.pace import StepTimes
from producers.engines.sampler import uniforms
from schemas.runspec import RunSpec

__all__ = [
    "EngineError",
    "EngineSettings",
    "FinishedRequest",
    "LocalEngine",
    "Pace",
    "Patch",
    "RunSpec",
    "SampleRequest",
    "StepTimes",
    "Unfinished",
    "digests_of",
    "model_of",
    "uniforms",
]

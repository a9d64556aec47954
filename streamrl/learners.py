"""For a learner of your own: see docs/extending/learner.md."""

from __future__ import annotations

from consumers.learners.learner import LocalLearner, TorchLearner
from consumers.learners.optimizing import Stepped
from consumers.learners.settings import LearnerSettings
from consumers.learners.torch_learner import TorchSettings
from schemas.runspec import RunSpec

__all__ = [
    "LearnerSettings",
    "LocalLearner",
    "RunSpec",
    "Stepped",
    "TorchLearner",
    "TorchSettings",
]

"""For a dispatch policy of your own: see docs/extending/policy.md."""

from __future__ import annotations

from producers.dispatch.board import Board, BoardGenerator
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.policy import DealtPolicy, Policy, PolicySettings, SteadyPolicy
from schemas.identity import SampleKey
from schemas.runspec import RunSpec

__all__ = [
    "Board",
    "BoardGenerator",
    "DealtPolicy",
    "Policy",
    "PolicySettings",
    "RunSpec",
    "SampleJob",
    "SampleKey",
    "SteadyPolicy",
]

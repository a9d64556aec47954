"""Dr. GRPO: GRPO without two biases: it divides by neither the group's deviation nor a sample's length."""

from __future__ import annotations

from consumers.losses.grpo import Grpo


class DrGrpo(Grpo):
    """The loss of "Understanding R1-Zero-like training", 2025."""

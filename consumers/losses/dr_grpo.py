"""Dr. GRPO: GRPO without its two biases: no division by the group's deviation, none by a sample's length."""

from __future__ import annotations

from consumers.losses.grpo import Grpo


class DrGrpo(Grpo):
    """Understanding R1-Zero-like training, 2025."""

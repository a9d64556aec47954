"""Which instance generates which sample, and when."""

from __future__ import annotations

REPORT_BYTES_PER_S = 100.0  # that an instance says of what it has and how far it is
_BEAT_S = 3.0


def beat_s(silence_s: float) -> float:
    """How often an instance says at least that it is there, if one is gone after so long a silence."""
    return min(_BEAT_S, silence_s / 4)

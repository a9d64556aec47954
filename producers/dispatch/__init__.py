"""Decides which generator makes which sample, and when."""

from __future__ import annotations

REPORT_BYTES_PER_S = 100.0  # most bytes of reports that a generator sends a second
_BEAT_S = 3.0


def beat_s(silence_s: float) -> float:
    """Return the seconds between two reports of a generator that counts as gone after `silence_s`."""
    return min(_BEAT_S, silence_s / 4)

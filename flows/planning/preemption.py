"""How often machines are taken away, as those of a spot market are, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

NOTICE_S, BACK_S = 30.0, 120.0  # as is usual; each market has its own


@dataclass(frozen=True)
class Preemption:
    """Each machine of a pool is taken away at random moments, and comes back after a while."""

    per_hour: float  # on the average, while the machine is there
    notice_s: float = NOTICE_S  # it is told so long before; 0: it is gone at once
    back_s: float = BACK_S  # from when it is gone until it, or another one in its place, is there

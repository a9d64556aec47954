"""How long the parts of a run take: the figures that profiles measure, and that plans and simulations read.

profile (measured) ──┐
                     ├──► EngineTimes, LearnerTimes, LinkTimes ──► simulation ──► plan
hardware table ──────┘

Each has a `spread`: the relative standard deviation of all its seconds, as far as they are not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

_FAR_S = 1e-3  # there and back: a link that takes less is within one place
_FETCH_TRIPS = 2.5  # an announcement comes; bytes are asked for and come; the site's report goes and comes
# TCP is slow to begin, and slow after a packet that a queue has dropped. A fetch takes longer by one of these
# shares of a round trip and of the bytes that cross in the first few: each as often, as measured on emulated
# links of 20 and 100 Mbit/s with a round trip of .1 s (130 versions of .8 MB, of five runs).
TCP_DELAYS = (0.2, 0.22, 0.23, 0.23, 0.38, 0.57, 0.85, 0.9, 1.55, 2.71)
_BEGINNING = 4  # round trips: bytes that cross later come at the link's rate


def share_filled(begun: float) -> float:
    """Return the share of steps in which any sample begins, where so many do in a step on average."""
    return -math.expm1(-begun)


@dataclass(frozen=True)
class DeviceRoom:
    """The memory of each device that a side has for itself."""

    taken: float  # bytes
    whole: float  # bytes that the device has
    weights: float = 0.0  # bytes of weights, among those that are taken


@dataclass(frozen=True)
class EngineTimes:
    """How fast one generator's engine is. A step draws one token for each of its samples."""

    batch_s: tuple[float, ...]  # seconds of a step with 0 (as with 1), 1, 2 … slots samples, without context
    context_s: float = 0.0  # further seconds of a step for each token that its samples attend to
    prefill_s: float = 0.0  # seconds for each token of a prompt; nothing else gets on meanwhile
    fill_s: float = 0.0  # further seconds of a step in which any sample begins
    install_s: float = 0.0  # seconds without a step while new weights are installed
    reward_s: float = 0.0  # seconds from the last token of a sample until it is published with its reward
    cores: float = 0.0  # CPU cores that it keeps busy; 0: it shares no cores with others
    # how many times as long it takes in a run that shares its cores: the part of a step that does not depend
    # on its samples, and the rest
    beside_step: float = 1.0
    beside_samples: float = 1.0
    memory_bytes: float = 0.0  # main memory that it takes, where processes share it; 0: nobody knows
    room: DeviceRoom | None = None  # None: nobody knows, or processes share main memory
    spread: float = 0.0
    unsteady: float = 0.0  # likewise, of the speed of its whole machine from one time to another

    @property
    def slots(self) -> int:
        """How many samples it draws at once."""
        return len(self.batch_s) - 1

    def beside(self, samples: int) -> float:
        """Return how many times as long a step with so many samples takes in a run that shares its cores."""
        fixed = self.fixed_share(samples)
        return fixed * self.beside_step + (1 - fixed) * self.beside_samples

    def fixed_share(self, samples: int) -> float:
        """Return the share of a step with so many samples that does not depend on them."""
        whole = self.batch_s[samples]
        return min(self.batch_s[1], whole) / whole


@dataclass(frozen=True)
class LearnerTimes:
    """How fast the trainer is, all its ranks together."""

    token_s: float  # seconds for each token of prompt and answer, with the scores of other models
    microbatch_s: float = 0.0  # further seconds of each micro-batch
    step_s: float = 0.0  # seconds of an optimizer step
    publish_s: float = 0.0  # seconds from an optimizer step until the new weights are announced
    version_bytes: int = 0  # that each generator's site fetches for a new version
    cores: float = 0.0  # CPU cores that it keeps busy; 0: it shares no cores with others
    beside: float = 1.0  # its seconds are so many times as long in a run that shares its cores
    memory_bytes: float = 0.0  # main memory that all its ranks take; 0: nobody knows
    room: DeviceRoom | None = None  # None: nobody knows, or processes share main memory
    spread: float = 0.0


@dataclass(frozen=True)
class LinkTimes:
    """How fast bytes come from the run's store to a site."""

    bytes_per_s: float
    latency_s: float = 0.0  # there and back
    spread: float = 0.0
    delays: tuple[float, ...] = (0.0,)  # see TCP_DELAYS

    def fetch_s(self, size: int, delay: float | None = None) -> float:
        """Return the seconds from the announcement of a version until so many bytes of it are at the site.

        `delay`: one of `delays`; by default their mean.
        """
        moving_s, late = size / self.bytes_per_s, fmean(self.delays) if delay is None else delay
        beginning_s = self.latency_s + min(moving_s, _BEGINNING * self.latency_s)
        return _FETCH_TRIPS * self.latency_s + moving_s + late * beginning_s

    @property
    def message_s(self) -> float:
        """Seconds of a message, one way; 0 within one place."""
        return self.latency_s / 2 if self.latency_s >= _FAR_S else 0.0

"""Decides for which samples to draft, and how many tokens: as many as make most tokens a second.

A step with drafts computes a row for each sample and each drafted token. It is expected to take as long as a
plain step of so many samples, times a factor that is measured.

             samples + chances of the drafted tokens
    rate  =  ───────────────────────────────────────      as against   samples / time of a plain step
             time of a step with so many rows

Where drafts don't pay, a few samples are looked at for a hundredth of the time, and all others cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from producers.engines.engine import Pace

MOST = 16  # tokens of one draft
LOOK = 8  # samples that are looked at where drafts don't pay
_MARGIN = 1.02  # a plan must promise so much more: chances and times are estimates
_PLAIN = 32  # one in so many steps is plain, to measure one
_THRIFT = 0.01  # of the time, for looks
_FADE = 0.9
_FORGETS = 64  # plain steps: slow steps with drafts may have had a cause that has passed
_THINKS = 8  # steps between two thoughts about whether drafts pay


class DraftPlan:
    """Chooses the samples to draft for, and the lengths of their drafts."""

    def __init__(self) -> None:
        self._times = np.zeros(0)  # of plain steps, by their number of samples
        self._plain_factor = 1.0  # of a plain step beside those that were learned: contexts grow
        self._factor = 1.0  # of a step with drafts, beside a plain one of so many samples
        self._draft_s = 5e-5  # to draft for one sample
        self._seen: list[Sequence[float]] = []  # chances of some recent drafts
        self._steps = 0
        self._pays = (0, False)  # for how many samples that was thought about
        self._spare_s = LOOK * self._draft_s  # for looks

    def learn(self, pace: Pace) -> None:
        """Take the times of plain steps."""
        if not pace.batches:
            return
        # a larger batch is never faster, so a slow small one was disturbed
        seconds = np.minimum.accumulate(np.array(pace.seconds)[::-1])[::-1]
        rows = np.arange(2 * pace.batches[-1] + LOOK * (MOST + 1))
        self._times = np.interp(rows, pace.batches, seconds)
        if len(pace.batches) > 1:
            slope = (seconds[-1] - seconds[-2]) / (pace.batches[-1] - pace.batches[-2])
            self._times += slope * np.maximum(0, rows - pace.batches[-1])

    def attention(self, samples: int) -> int:
        """Return for how many of the running samples to draft in the next step."""
        self._steps += 1
        if not self._times.size:
            return 0
        if self._steps % _THINKS == 0 or samples != self._pays[0]:
            self._pays = samples, self._best(samples, self._seen, samples * self._draft_s)[0] > 0
        if self._pays[1]:
            return samples
        few = min(samples, LOOK)
        return few if few * self._draft_s <= self._spare_s else 0

    def lengths(self, samples: int, looked: int, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many tokens of each draft to use, if `looked` of the samples were drafted for.

        The tokens that are most likely right come first, as long as they pay.
        """
        self._seen = [*chances[:LOOK], *[()] * (min(LOOK, looked) - len(chances[:LOOK]))]
        none = [0] * len(chances)
        if looked < samples or (self._steps + 1) % _PLAIN == 0:
            return none
        best, order = self._best(samples, chances, 0.0, looked)
        for number in order[:best]:
            none[number] += 1
        return none

    def least_chance(self, samples: int) -> float:
        """Return how likely a token must be right so that it pays to draft for a sample."""
        here = self._time(samples)
        return samples / here * (self._draft_s + self._time(samples + 1) - here)

    def drafting_took(self, samples: int, seconds: float) -> None:
        """Note how long drafting for so many samples took."""
        self._draft_s = self._draft_s * _FADE + (1 - _FADE) * seconds / samples
        self._spare_s = max(0.0, self._spare_s - seconds)

    def step_took(self, samples: int, drafted: int, seconds: float) -> None:
        """Note how long a step of `samples` samples and `drafted` drafted tokens took."""
        if not self._times.size:
            return
        self._spare_s = min(self._spare_s + _THRIFT * seconds, 2 * LOOK * self._draft_s)
        factor = seconds / self._time(samples + drafted)
        if drafted:
            self._factor = self._factor * _FADE + (1 - _FADE) * factor / self._plain_factor
        else:
            self._plain_factor = self._plain_factor * _FADE + (1 - _FADE) * factor
            self._factor += (1.0 - self._factor) / _FORGETS

    def _best(
        self, samples: int, chances: Sequence[Sequence[float]], cost_s: float, looked: int | None = None
    ) -> tuple[int, list[int]]:
        """Return how many drafted tokens make most tokens a second, and of which drafts they are, best first.

        The chances are those of `looked` samples, and stand for all; drafting itself takes `cost_s`.
        """
        every = sorted(
            ((chance, number) for number, draft in enumerate(chances) for chance in draft), reverse=True
        )
        if not every:
            return 0, []
        share = samples / (looked or len(chances))
        made = samples + share * np.cumsum([0.0, *(chance for chance, _ in every)])
        rows = np.ceil(samples + share * np.arange(made.size)).astype(int)
        plain = self._times[np.minimum(rows, self._times.size - 1)]
        seconds = plain * self._factor + cost_s
        seconds[0] = plain[0] / _MARGIN
        return int(np.argmax(made / seconds)), [number for _, number in every]

    def _time(self, samples: int) -> float:
        """Return the seconds of a plain step."""
        return float(self._times[min(samples, self._times.size - 1)])

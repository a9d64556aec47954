"""Decides how many tokens to draft for each sample: as many as make most tokens a second, by measured step times.

A step with drafts computes a row for each sample and each drafted token. It is expected to take as long as a plain
step of so many samples, times a factor that is measured; so is a plain step, since contexts grow.

             tokens expected: samples + chances of the drafts
    rate  =  ─────────────────────────────────────────────────      as against   samples / time of a plain step
             time of a step with so many rows
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from producers.engines.acceptance import expected_tokens
from producers.engines.pace import StepTimes

MOST = 16  # tokens of one draft
_MARGIN = 1.02  # a plan must promise so much more: chances and times are estimates
_PLAIN = 32  # one in so many steps is plain, to measure one
_THRIFT = 0.01  # of a step's time: drafts that cost less are made even where little is hoped of them
_FADE = 0.9
_LOOKS = 64  # steps between two looks at whether drafts pay for a batch


class DraftPlan:
    """Chooses the lengths of drafts."""

    def __init__(self, plain: StepTimes) -> None:
        self._times = plain  # of steps without drafts
        self._curve: tuple[np.ndarray, np.ndarray] | None = None
        self._plain_factor = self._draft_factor = 1.0
        self._draft_s = 2e-5  # to draft for one sample
        self._steps = 0

    def is_worth_drafting(self, samples: int, share: float) -> bool:
        """Whether drafts may pay for a batch, where a share of drafted tokens is right. Now and then: yes."""
        self._steps += 1
        if self._steps % _LOOKS == 1:
            pace = self._times.pace()
            self._curve = (np.array(pace.batches), np.array(pace.seconds)) if pace.batches else None
        if self._curve is None:
            return False
        plain = float(self._seconds(np.array([samples]))[0])
        if samples * self._draft_s < _THRIFT * plain:
            return True
        counts = [1, 2, 4, 8]
        rows = samples * (1 + np.array(counts))
        made = samples * (1 + np.array([expected_tokens(share, count) for count in counts]))
        rate = made / (self._seconds(rows) * self._draft_factor + samples * self._draft_s)
        return bool(rate.max() > _MARGIN * samples / (plain * self._plain_factor))

    def looks_closer(self) -> bool:
        """Whether it is time to look at some drafts although they may not pay."""
        return self._steps % _LOOKS == 0

    def lengths(self, samples: int, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many tokens of each draft to use: those most likely to be right, as long as they pay."""
        none = [0] * len(chances)
        if self._curve is None or self._steps % _PLAIN == 0:
            return none
        every = sorted(
            ((chance, number) for number, draft in enumerate(chances) for chance in draft), reverse=True
        )
        if not every:
            return none
        made = samples + np.cumsum([0.0] + [chance for chance, _ in every])
        seconds = self._seconds(samples + np.arange(made.size)) * self._draft_factor
        seconds[0] *= self._plain_factor / self._draft_factor / _MARGIN
        best = int(np.argmax(made / seconds))
        for _, number in every[:best]:
            none[number] += 1
        return none

    def drafting_took(self, samples: int, seconds: float) -> None:
        """Note how long drafting for so many samples took."""
        self._draft_s = self._draft_s * _FADE + (1 - _FADE) * seconds / samples

    def step_took(self, samples: int, drafted: int, seconds: float) -> None:
        """Note how long a step of `samples` samples and `drafted` drafted tokens took."""
        if self._curve is None:
            return
        factor = seconds / float(self._seconds(np.array([samples + drafted]))[0])
        if drafted:
            self._draft_factor = self._draft_factor * _FADE + (1 - _FADE) * factor
        else:
            self._plain_factor = self._plain_factor * _FADE + (1 - _FADE) * factor
            # what made drafts slow may have passed
            self._draft_factor += (self._plain_factor - self._draft_factor) / _LOOKS

    def _seconds(self, rows: np.ndarray) -> np.ndarray:
        assert self._curve is not None
        sizes, seconds = self._curve
        found = np.interp(rows, sizes, seconds)
        if sizes.size > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
            found += slope * np.maximum(0, rows - sizes[-1])
        return found

"""Learns how often drafted tokens are right: by the length of the match, and of each sample beside the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

_CLASSES = 7  # matches of 1, 2-3, 4-7, ... tokens
_FADE = 0.998  # weight of an older token after each new one
_OWN = 4.0  # tokens' worth of belief that a sample is like the others


class Acceptance:
    """Shares of right tokens. One that follows a wrong one tells nothing and is not counted."""

    def __init__(self) -> None:
        self._right, self._tried = [1.0] * _CLASSES, [2.0] * _CLASSES
        self._own: dict[str, tuple[float, float]] = {}  # right, and expected to be right
        self.drafted_right, self.drafted = 16.0, 16.0  # of whole drafts; hopeful at first

    @property
    def share(self) -> float:
        """The share of drafted tokens that were right lately."""
        return self.drafted_right / self.drafted

    def chances(self, name: str, match: int, count: int) -> list[float]:
        """Return for each token of a draft how likely it and all before it are right."""
        right, expected = self._own.get(name, (0.0, 0.0))
        factor = (right + _OWN) / (expected + _OWN)
        found, chance = [], 1.0
        for number in range(match, match + count):
            kind = _kind(number)
            chance *= min(0.999, factor * self._right[kind] / self._tried[kind])
            found.append(chance)
        return found

    def judge(self, name: str, match: int, draft: Sequence[int], came: Sequence[int]) -> None:
        """Learn from a draft and the tokens that came in its place."""
        right, expected = self._own.get(name, (0.0, 0.0))
        for number, (guess, token) in enumerate(zip(draft, came, strict=False)):
            kind, hit = _kind(match + number), float(guess == token)
            expected = expected * _FADE + self._right[kind] / self._tried[kind]
            right = right * _FADE + hit
            self._right[kind] = self._right[kind] * _FADE + hit
            self._tried[kind] = self._tried[kind] * _FADE + 1
            self.drafted_right = self.drafted_right * _FADE + hit
            self.drafted = self.drafted * _FADE + 1
            if not hit:
                break
        self._own[name] = right, expected

    def forget(self, name: str) -> None:
        """Forget a sample."""
        self._own.pop(name, None)


def _kind(match: int) -> int:
    return min(_CLASSES, max(1, match).bit_length()) - 1


def expected_tokens(share: float, count: int) -> float:
    """Return how many of `count` drafted tokens are expected to be right before the first wrong one."""
    return math.fsum(share**number for number in range(1, count + 1))

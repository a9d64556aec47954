"""Learns how often drafted tokens are right: by the length of the match, and sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_CLASSES = 7  # matches of 1, 2-3, 4-7, ... tokens
_FADE = 0.998  # weight of an older token after each new one
_OWN = 4.0  # tokens' worth of belief that a sample is like the others
_MOST_REST = 64  # steps


@dataclass
class _Own:
    right: float = 0.0
    expected: float = 0.0  # to be right
    rest: int = 0  # steps until the next draft
    last_rest: int = 0


class Acceptance:
    """Shares of right tokens. One that follows a wrong one tells nothing and is not counted."""

    def __init__(self) -> None:
        self._right, self._tried = [1.0] * _CLASSES, [2.0] * _CLASSES
        self._own: dict[str, _Own] = {}

    def chances(self, name: str, match: int, count: int, least: float) -> list[float]:
        """Return for each token of a draft how likely it and all before it are right, down to `least`.

        A sample whose drafts promise too little rests: once for a step, then for two, four and so on.
        """
        own = self._own.setdefault(name, _Own())
        factor = (own.right + _OWN) / (own.expected + _OWN)
        found, chance = [], 1.0
        for number in range(match, match + count):
            kind = _kind(number)
            chance *= min(0.999, factor * self._right[kind] / self._tried[kind])
            if chance < least:
                break
            found.append(chance)
        own.last_rest = 0 if found else min(_MOST_REST, max(1, 2 * own.last_rest))
        own.rest = own.last_rest
        return found

    def rests(self, name: str) -> bool:
        """Whether a sample is not drafted for in this step."""
        own = self._own.get(name)
        if own is None or not own.rest:
            return False
        own.rest -= 1
        return True

    def judge(self, name: str, match: int, draft: Sequence[int], came: Sequence[int]) -> None:
        """Learn from a draft and the tokens that came in its place."""
        own = self._own.setdefault(name, _Own())
        for number, (guess, token) in enumerate(zip(draft, came, strict=False)):
            kind, hit = _kind(match + number), float(guess == token)
            own.expected = own.expected * _FADE + self._right[kind] / self._tried[kind]
            own.right = own.right * _FADE + hit
            self._right[kind] = self._right[kind] * _FADE + hit
            self._tried[kind] = self._tried[kind] * _FADE + 1
            if not hit:
                break

    def forget(self, name: str) -> None:
        """Forget a sample."""
        self._own.pop(name, None)


def _kind(match: int) -> int:
    return min(_CLASSES, max(1, match).bit_length()) - 1

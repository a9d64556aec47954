"""The findings of an inspection before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from infra.background import Background
from infra.errors import Explained
from schemas.shortening import printable

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line about one thing, and whether that thing is wrong."""

    thing: str
    said: str
    wrong: bool = False
    away: bool = False  # it is wrong since it does not answer: that may mend itself
    noted: bool = False  # it is not wrong, and people should know it all the same

    @property
    def line(self) -> str:
        """The finding as it is shown."""
        return printable(f"{self.thing}: {self.said}".replace("\n", " "), 1_000)


class NoAnswer(Explained):
    """Something outside was asked, and did not answer in time."""


def within(seconds: float, ask: Callable[[], _T]) -> _T:
    """Return the result of `ask`. Raises NoAnswer after `seconds`, and leaves the asking thread behind."""
    answers: list[_T] = []
    asking = Background(lambda: answers.append(ask()), "look")
    asking.start()
    asking.join(seconds)
    asking.check()
    if not answers:
        raise NoAnswer(f"no answer within {seconds:g} s")
    return answers[0]

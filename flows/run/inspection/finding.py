"""The findings of an inspection before a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from infra.errors import Explained
from schemas.shortening import printable

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line about one thing, and whether that thing is wrong."""

    thing: str
    said: str
    wrong: bool = False

    @property
    def line(self) -> str:
        """The finding as it is shown."""
        return printable(f"{self.thing}: {self.said}".replace("\n", " "), 1_000)


class NoAnswer(Explained):
    """Something outside was asked, and did not answer in time."""


def within(seconds: float, ask: Callable[[], _T]) -> _T:
    """Return the result of `ask`. Raises NoAnswer after `seconds`, and leaves the asking thread behind."""
    answers: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="look", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise NoAnswer(f"no answer within {seconds:g} s")
    return answers[0]

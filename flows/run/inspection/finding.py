"""What a look before a run finds."""

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
    """One line about one thing."""

    thing: str
    said: str
    wrong: bool = False

    @property
    def line(self) -> str:
        """As it is shown."""
        return printable(f"{self.thing}: {self.said}".replace("\n", " "), 1_000)


class NoAnswer(Explained):
    """Something outside was asked, and did not answer in time."""


def within(seconds: float, ask: Callable[[], _T]) -> _T:
    """What is answered; raises NoAnswer after so long. The thread that asks is left behind then."""
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

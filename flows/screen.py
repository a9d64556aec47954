"""Whom a run tells how it is doing. The terminal is in `flows.live`, Prefect in `flows.train`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flows.view import RunView


class Screen(Protocol):
    """Somebody who watches a run."""

    def say(self, text: str) -> None:
        """News: a line that stays."""

    def progress(self, fraction: float, text: str) -> None:
        """How far a phase before training is."""

    def show(self, view: RunView) -> None:
        """The run as it is now; called a few times a second."""


class Nobody:
    """Nobody watches."""

    def say(self, text: str) -> None: ...

    def progress(self, fraction: float, text: str) -> None: ...

    def show(self, view: RunView) -> None: ...


class Screens:
    """Several at once."""

    def __init__(self, screens: Sequence[Screen]) -> None:
        self._screens = screens

    def say(self, text: str) -> None:
        for screen in self._screens:
            screen.say(text)

    def progress(self, fraction: float, text: str) -> None:
        for screen in self._screens:
            screen.progress(fraction, text)

    def show(self, view: RunView) -> None:
        for screen in self._screens:
            screen.show(view)

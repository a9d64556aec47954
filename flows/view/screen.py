"""Screens show how a run is doing. The terminal's is in `flows.view.live`, Prefect's in `flows.flow_runs`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from flows.view.run_view import RunView

_log = logging.getLogger("streamrl.screen")


class Screen(Protocol):
    """A place where people watch a run."""

    def say(self, text: str) -> None:
        """Show a line of news that stays."""

    def progress(self, fraction: float, text: str) -> None:
        """Show how far a phase before training is. `fraction` goes from 0 to 1."""

    def show(self, view: RunView) -> None:
        """Show the run as it is now. Called a few times a second."""


class Nobody:
    """A screen that shows nothing."""

    def say(self, text: str) -> None: ...

    def progress(self, fraction: float, text: str) -> None: ...

    def show(self, view: RunView) -> None: ...


class Screens:
    """Several screens as one. An error of one is logged once, and ends nothing."""

    def __init__(self, screens: Sequence[Screen]) -> None:
        self._screens, self._failed = screens, set[str]()

    def say(self, text: str) -> None:
        self._all(lambda screen: screen.say(text))

    def progress(self, fraction: float, text: str) -> None:
        self._all(lambda screen: screen.progress(fraction, text))

    def show(self, view: RunView) -> None:
        self._all(lambda screen: screen.show(view))

    def _all(self, tell: Callable[[Screen], None]) -> None:
        for screen in self._screens:
            try:
                tell(screen)
            except Exception as error:  # whatever it is: a view never ends a run
                name = f"{type(screen).__name__}: {type(error).__name__}"
                if name not in self._failed:
                    self._failed.add(name)
                    _log.warning("a view of the run failed, and the run goes on: %s: %s", name, error)

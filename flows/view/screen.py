"""Whom a run tells how it is doing. The terminal is in `flows.view.live`, Prefect in `flows.train`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from flows.view.run_view import RunView

_log = logging.getLogger("streamrl.screen")


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
    """Several at once. One that fails is said once in the log, and ends nothing."""

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

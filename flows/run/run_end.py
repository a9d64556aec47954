"""Tells by the heartbeats of a run's own processes whether it has ended, for processes that joined it."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.messages import ENDED, FAILED, Heartbeat


class RunEnd:
    """The newest heartbeats of a run's feeder and trainer."""

    def __init__(self, *, generates: bool = True) -> None:
        """`generates`: whether the run has a feeder; an offline run has a trainer alone."""
        self._generates = generates
        self._states = dict[str, str]()  # by role

    def hear(self, beats: Iterable[Heartbeat]) -> None:
        """Take heartbeats of any processes, in their order."""
        for beat in beats:
            if beat.role in ("feeder", "trainer"):
                self._states[beat.role] = beat.state

    @property
    def has_come(self) -> bool:
        """Whether nobody is given work any more.

        A feeder that failed is started again by its run. A run that gives up on it stops the trainer. Without
        a feeder it has come when the trainer has ended or failed, unless that starts again soon.
        """
        feeder, trainer = self._states.get("feeder"), self._states.get("trainer")
        if not self._generates:
            return trainer in (ENDED, FAILED)
        return feeder == ENDED or (feeder == FAILED and trainer == ENDED)

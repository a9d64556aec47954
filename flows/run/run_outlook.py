"""Tells processes that joined a run whether it is over, or paused, or about to go on.

heartbeats      the feeder has ended, as at the run's end, in a pause, and before it is started again; in an
                offline run, which has none, the trainer. Without any for long the run is lost
runs/<run>/state.json      which of these it is, as the run's flow writes it down
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from flows.run.request import RunFailed
from flows.run.run_end import RunEnd
from flows.run.run_state import SILENT_S, RunState, read_state
from infra.runs import RunRecord
from infra.stores.store import Store, StoreError
from schemas.messages import Heartbeat

BACK_S = 600.0  # for a flow that was killed to be there again: it first compares the files of the run
LOST_S = 3600.0  # at least so long a run may say nothing
_LOOK_S = 1.0


class RunOutlook:
    """Heartbeats and the state of one run, watched by this machine's clock."""

    def __init__(self, store: Store, record: RunRecord) -> None:
        spec = record.spec
        self._store, self._run, self._end = store, record.id, RunEnd(generates=spec.generates)
        # a process that waits in vain ends after `progress_s`, and is started again so often
        self._lost_s = max(LOST_S, (1 + spec.placement.restarts) * spec.deadlines.progress_s)
        self._heard = dict[str, tuple[int, float]]()  # by role, process and time of the newest heartbeat
        self._state: RunState | None = None
        self._looked_at = float("-inf")
        self._changed_at = self._ended_at = self._heard_at = time.monotonic()

    def hear(self, beats: Iterable[Heartbeat]) -> None:
        """Take heartbeats of any processes, in their order."""
        before, beats = self._end.has_come, list(beats)
        self._end.hear(beats)
        for beat in beats:  # the newest of a process may be told again and again
            if beat.role in ("feeder", "trainer") and self._heard.get(beat.role) != (beat.pid, beat.sent_at):
                self._heard[beat.role] = beat.pid, beat.sent_at
                self._heard_at = time.monotonic()
        if self._end.has_come and not before:
            self._ended_at, self._looked_at = time.monotonic(), float("-inf")

    def is_over(self) -> bool:
        """Whether the run has ended, or was stopped, and is not about to go on."""
        if not self._end.has_come:
            return False
        self._look()
        if self._state is None or not self._state.is_active or self._state.trained:
            return True
        if self._state.state == "paused":
            return self._is_silent()
        # While the flow writes, the run goes on: its trainer, which needs its ranks, may write the last
        # checkpoint, or a resumed one may be about to start its feeder.
        return time.monotonic() - max(self._ended_at, self._changed_at) > BACK_S

    def check_heard(self) -> None:
        """Raise RunFailed if the run's own processes have said nothing for so long that it is lost."""
        silent_s = time.monotonic() - self._heard_at
        if not self._end.has_come and silent_s > self._lost_s:
            raise RunFailed(
                f"feeder and trainer of run {self._run} have said nothing for {silent_s / 60:.0f} minutes: "
                "they were killed, or this machine no longer reaches the broker. Join again when that is over"
            )

    def is_paused(self) -> bool:
        """Whether the run is paused: its flow is there, and none of its processes."""
        if not self._end.has_come:
            return False
        self._look()
        return self._state is not None and self._state.state == "paused" and not self._is_silent()

    def _is_silent(self) -> bool:
        """Whether the flow has written nothing for so long that it is gone."""
        return time.monotonic() - self._changed_at > SILENT_S

    def _look(self) -> None:
        if time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            state = read_state(self._store, self._run)
        except StoreError:
            return  # it may be back soon; what was known stands
        if state != self._state:
            self._state, self._changed_at = state, time.monotonic()

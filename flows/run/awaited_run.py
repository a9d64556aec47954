"""Waits for a run to go on, so that machines may join it before it is started.

runs/<run>/state.json   the run's flow writes it every few seconds, from when record and topics are there
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flows.run.locations import named_store
from flows.run.request import RunFailed
from flows.run.run_state import HEARD_WITHIN_S, RunState, read_state
from infra.runs import RunError, find, runs_of
from infra.stores.store import Store, StoreError

_LOOK_S, _LIST_S = 1.0, 5.0  # between looks for one run, and between lists of all


def awaited_run(
    run: str, *, store: str, wait_s: float, newest: bool = False, say: Callable[[str], None]
) -> str:
    """Return the id of the run to join, once it goes on; without a wait, or `newest`, that is `run` itself.

    `newest`: `run` is a name without a number, and the run of that name with the highest number is meant, if
    its flow is heard during the wait, which then takes long enough for that. One that has ended is passed
    over: the next one, or a resume, is waited for. Raises RunError, RunFailed or StoreError after the wait.
    """
    if not newest and not wait_s:
        return run
    looks = _Looks(named_store(store), run, newest=newest)
    wait_s = max(wait_s, HEARD_WITHIN_S) if newest else wait_s
    until, told = time.monotonic() + wait_s, False
    while (found := looks.look()) is None:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise looks.in_vain(wait_s)
        if not told:
            say(f"waiting up to {wait_s:g} s for {looks.wanted} to go on")
            told = True
        time.sleep(min(left_s, _LIST_S if newest else _LOOK_S))
    return found


class _Looks:
    """Looks for a run that goes on, and remembers the last one."""

    def __init__(self, store: Store, run: str, *, newest: bool) -> None:
        self._store, self._run, self._newest = store, run, newest
        self._before: dict[str, RunState | None] | None = None  # as it was at the first look
        self._seen: str | None = None
        self._state: RunState | None = None
        self._error: StoreError | None = None
        self.wanted = f"{'the newest run of the name' if newest else 'run'} {run} in {store.url}"

    def look(self) -> str | None:
        """Return the id of the run if it goes on. A store that can't be read may be back soon."""
        try:
            self._seen = next(reversed(runs_of(self._store, self._run)), None) if self._newest else self._run
            self._state = read_state(self._store, self._seen) if self._seen else None
            self._error = None
        except StoreError as error:
            self._error = error
            return None
        if self._before is None:
            self._before = {self._seen: self._state} if self._seen else {}
        return self._seen if self._goes_on(self._before) else None

    def _goes_on(self, before: dict[str, RunState | None]) -> bool:
        """Whether the flow lives. A state that is written anew says so, whatever the clock of its machine.

        One that was there before says it of a run with an id: that run's next start is meant as well. The
        newest run may have been killed a moment ago, and then another one is meant.
        """
        state = self._state
        if self._seen is None or state is None or not state.is_active or state.trained:
            return False
        return state != before.get(self._seen) or (not self._newest and state.now != "silent")

    def in_vain(self, waited_s: float) -> Exception:
        """Return the error that no run went on."""
        waited = f"(waited {waited_s:g} s for it)"
        if self._error is not None:
            return StoreError(f"{self._error} {waited}")
        if self._seen is None:
            return RunError(
                f"there is no run of the name {self._run} in {self._store.url}; --newest takes a name, such "
                f"as count, without a number, and --store names another store {waited}"
            )
        try:
            find(self._store, self._seen)
        except RunError as error:
            return RunError(f"{error} {waited}")
        now = self._state.now if self._state else "not written yet"
        go_on = f". To {self._state.go_on}" if self._state and self._state.go_on else ""
        return RunFailed(f"run {self._seen} does not go on, its state is {now} {waited}{go_on}")

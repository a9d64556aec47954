"""Notes on how long things in a store have been unchanged, as this machine has seen it.

<prefix>/garbage.json     chunks that no version names
<prefix>/readers.json     leases, with a hash of each as it was last seen

    {clock: {name: [state, when the state was first seen]}}

No other machine's clock is believed: a machine notes what it sees by a clock that counts from the machine's
start, and makes no use of others' notes. Two collectors on two machines delay each other, and no more.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable
from functools import cache
from typing import Any

from infra.boot_id import boot_id
from infra.stores.store import Missing, Store

_CLOCKS = 8  # clocks whose notes are kept
_LATEST = 1 << 40  # seconds: no machine runs so long
_LARGEST = 64 << 20  # bytes of a file of notes: half a million chunks have about as many

_log = logging.getLogger("streamrl.weights")


def now() -> float:
    """Return the seconds since this machine was started, with those that it slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@cache
def clock() -> str:
    """Return a name for the clock of `now`: the id of this start of this machine."""
    try:
        return boot_id()
    except OSError:
        return uuid.uuid4().hex  # then each process has a clock of its own


class StoreNotes:
    """The notes on one kind of thing, such as leases."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._all = self._read()
        found = self._all.pop(clock(), {})
        self._mine: dict[str, tuple[str, float]] = {
            str(name): (str(said[0]), float(said[1]))
            for name, said in (found.items() if isinstance(found, dict) else ())
            if _is_note(said)
        }

    def age_s(self, name: str, said: str = "") -> float:
        """Return for how many seconds a thing has been in state `said`; 0 if the state is new."""
        before, since = self._mine.get(name, ("", now()))
        if before != said or since > now():
            since = now()
        self._mine[name] = said, since
        return now() - since

    def save(self, names: Iterable[str]) -> None:
        """Write this machine's notes on these things, and forget those on all others."""
        kept = {name: self._mine[name] for name in names if name in self._mine}
        others = dict(list(self._all.items())[-_CLOCKS + 1 :])
        if kept or self._mine or others:
            self._store.put(self._key, json.dumps({**others, clock(): kept}).encode())

    def _read(self) -> dict[str, Any]:
        try:
            raw = self._store.get(self._key, _LARGEST)
            if len(raw) > _LARGEST:
                _log.warning(
                    "%s/%s has more than %d bytes, so it is passed over, and written anew",
                    self._store.url, self._key, _LARGEST,
                )  # fmt: skip
                return {}
            said = json.loads(raw)
        except (Missing, ValueError, RecursionError):
            return {}
        return said if isinstance(said, dict) else {}


def _is_note(said: object) -> bool:
    return (
        isinstance(said, list) and len(said) == 2 and isinstance(said[0], str)
        and type(said[1]) in (int, float) and 0 <= said[1] < _LATEST
    )  # fmt: skip

"""Leases: a process that reads or publishes a version keeps the version from being collected.

<prefix>/leases/<reader>.json     the version, and a number that grows with each renewal

A thread renews the lease, however slowly chunks come. A lease lapses when collectors have seen no renewal for
`LEASE_S`, by their own clocks: its holder's clock may be wrong, and its version far behind.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from types import TracebackType

from blake3 import blake3

from infra.stores.store import Missing, Store, StoreError
from infra.weights.notes import StoreNotes

LEASE_S = 600.0  # seconds without a renewal until a lease lapses
RENEW_S = 60.0  # seconds between renewals
_LARGEST = 4096  # bytes: a lease has about a hundred; of a larger one the rest is not read

_log = logging.getLogger("streamrl.weights")


class Lease:
    """A lease on a version, and on the versions that lead to it, for as long as its `with` block runs."""

    def __init__(
        self, store: Store, prefix: str, version: int, holder: str = "", *, puts: bool = False,
        renew_s: float = RENEW_S,
    ) -> None:  # fmt: skip
        """`puts`: the holder puts chunks that no version names yet: none may be collected meanwhile."""
        self._store, self._version, self._puts, self._renew_s = store, version, puts, renew_s
        self._key = f"{prefix}/leases/{holder or uuid.uuid4().hex}.json"
        self._over, self._beats = threading.Event(), 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="lease")

    def __enter__(self) -> Lease:
        self.renew()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()  # its last renewal must not come after the deletion
        self._store.delete(self._key)

    def _work(self) -> None:
        said = ""
        while not self._over.wait(self._renew_s):
            try:
                self.renew()
                said = ""
            except Exception as error:  # it is tried again: a lease lapses only after several failures
                if said != (said := f"{type(error).__name__}: {error}"):
                    level = logging.WARNING if isinstance(error, StoreError) else logging.ERROR
                    _log.log(level, "the lease on weights %d can't be renewed: %s", self._version, said)

    def renew(self) -> None:
        """Put the lease again, with the next number."""
        self._beats += 1
        said = {"version": self._version, "at": time.time(), "puts": self._puts, "beats": self._beats}
        self._store.put(self._key, json.dumps(said).encode())


def leased(store: Store, prefix: str) -> tuple[list[int], bool]:
    """Return the versions that have leases, and whether any holder puts chunks. Removes lapsed leases."""
    keys = store.list(f"{prefix}/leases")
    notes = StoreNotes(store, f"{prefix}/readers.json")
    found, putting, alive = [], False, []
    for key in keys:
        try:
            raw = store.get(key, _LARGEST)
        except Missing:
            continue  # released since it was listed
        if notes.age_s(key, blake3(raw).hexdigest(8)) >= LEASE_S:
            store.delete(key)  # its holder died
            continue
        alive.append(key)
        version, puts = _said(raw)
        found.append(version)
        putting |= puts
    notes.save(alive)
    return found, putting


def _said(raw: bytes) -> tuple[int, bool]:
    """Return a lease's version, and whether its holder puts chunks. An unreadable lease keeps everything."""
    try:
        said = json.loads(raw)
        return int(said["version"]), bool(said["puts"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0, True

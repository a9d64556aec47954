"""Who reads or publishes a version keeps it from being collected, for as long as it says so.

<prefix>/leases/<reader>.json     which version, and a number that grows with each renewal

A lease is renewed by a thread, however slowly chunks come. It lapses when collectors have seen no renewal for
a while, by their own clock: a reader's may be wrong by hours, and it may be far behind.
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

LEASE_S = 600.0  # without a renewal
RENEW_S = 60.0

_log = logging.getLogger("streamrl.weights")


class Lease:
    """Keeps a version, and what leads to it, while it is being read or published."""

    def __init__(
        self, store: Store, prefix: str, version: int, holder: str = "", *, puts: bool = False,
        renew_s: float = RENEW_S,
    ) -> None:  # fmt: skip
        """`puts`: what is put meanwhile, no version names yet."""
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
        self._thread.join()  # what it says last must not come behind the end
        self._store.delete(self._key)

    def _work(self) -> None:
        said = ""
        while not self._over.wait(self._renew_s):
            try:
                self.renew()
                said = ""
            except Exception as error:  # it is tried again: a lease lapses only after several renewals
                if said != (said := f"{type(error).__name__}: {error}"):
                    level = logging.WARNING if isinstance(error, StoreError) else logging.ERROR
                    _log.log(level, "the lease on weights %d can't be renewed: %s", self._version, said)

    def renew(self) -> None:
        """Say that somebody is still at it."""
        self._beats += 1
        said = {"version": self._version, "at": time.time(), "puts": self._puts, "beats": self._beats}
        self._store.put(self._key, json.dumps(said).encode())


def leased(store: Store, prefix: str) -> tuple[list[int], bool]:
    """The versions that somebody reads, and whether anybody puts chunks. Lapsed leases are removed."""
    keys = store.list(f"{prefix}/leases")
    notes = StoreNotes(store, f"{prefix}/readers.json")
    found, putting, alive = [], False, []
    for key in keys:
        try:
            raw = store.get(key)
        except Missing:
            continue  # given back since it was listed
        if notes.age_s(key, blake3(raw).hexdigest(8)) >= LEASE_S:
            store.delete(key)  # of a reader that died
            continue
        alive.append(key)
        version, puts = _said(raw)
        found.append(version)
        putting |= puts
    notes.save(alive)
    return found, putting


def _said(raw: bytes) -> tuple[int, bool]:
    """A lease's version, and whether its holder puts chunks. One that can't be read keeps everything."""
    try:
        said = json.loads(raw)
        return int(said["version"]), bool(said["puts"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0, True

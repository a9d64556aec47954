"""Decides which process fetches an object for its site: the first one that claims it in the site's cache.

claims/<name>   the holder, and a number that grows while the holder is at work

A claim whose number does not grow for 10 s is that of a dead process, and the next process takes it over. If
two take it over at the same moment, both fetch, which costs bytes and harms nothing. A claim that nobody
takes over, since its object came in another way, is removed when the relay tidies up.

holders.json    when each claim was first seen as it is
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid

from blake3 import blake3

from infra.stores.store import Exists, Missing, Store
from infra.weights.notes import StoreNotes

_STALE_S = 10.0
_RENEW_S = 2.0
_DEAD_S = 3600.0  # for so long a claim has not changed when it is removed
_LARGEST = 4096  # bytes: a claim has about sixty; of a larger one the rest is not read


class Claim:
    """One process's claim on one object."""

    def __init__(
        self, cache: Store, name: str, *, stale_s: float = _STALE_S, renew_s: float = _RENEW_S
    ) -> None:
        self._cache, self._key = cache, f"claims/{name}"
        self._stale_s, self._renew_s = stale_s, renew_s
        self._holder, self._beats, self._said_at = uuid.uuid4().hex, 0, 0.0
        self._seen, self._since = b"", time.monotonic()

    def taken(self) -> bool:
        """Try to take the claim. Return whether this process holds it now."""
        with contextlib.suppress(Exists):
            self._cache.put_new(self._key, self._said())
            return True
        if not self._stale():
            return False
        self._cache.delete(self._key)
        with contextlib.suppress(Exists):
            self._cache.put_new(self._key, self._said())
            return True
        return False

    def renew(self) -> None:
        """Show the others, every few seconds at most, that this process still works on the object."""
        if time.monotonic() - self._said_at > self._renew_s:
            self._cache.put(self._key, self._said())

    def release(self) -> None:
        """Give up the claim, because the object is in the cache or could not be fetched."""
        self._cache.delete(self._key)

    def _said(self) -> bytes:
        self._beats, self._said_at = self._beats + 1, time.monotonic()
        return json.dumps({"holder": self._holder, "beats": self._beats}).encode()

    def _stale(self) -> bool:
        """Return whether another process's claim has not changed for too long, by our own clock."""
        try:
            said = self._cache.get(self._key, _LARGEST)
        except Missing:
            said = b""
        if said != self._seen:
            self._seen, self._since = said, time.monotonic()
        return time.monotonic() - self._since > self._stale_s


def sweep_claims(cache: Store) -> None:
    """Remove claims whose holders died long ago."""
    notes, alive = StoreNotes(cache, "holders.json"), []
    for key in cache.list("claims"):
        with contextlib.suppress(Missing):  # released since it was listed
            if notes.age_s(key, blake3(cache.get(key, _LARGEST)).hexdigest(8)) >= _DEAD_S:
                cache.delete(key)
            else:
                alive.append(key)
    notes.save(alive)

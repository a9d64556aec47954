"""The weights' store as a site sees it: a cache, with the origin behind it.

get ──► cache ──► there: done
          │ not there, and we may fetch (else wait for it)
          └──► claimed by another of the site: wait for it ──► cache
               ours: origin ──► checked ──► cache

Manifests, keyframes and chunks are fetched from the origin; all other objects (leases, notes) are in the
cache alone. If the cache does not work, the origin is read instead, which only costs bytes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from blake3 import blake3

from infra.sites.claims import Claim, sweep_claims
from infra.sites.origin import OriginStore
from infra.sites.peers import Way
from infra.stores.orphans import sweep
from infra.stores.store import Exists, Missing, Store, StoreError
from infra.weights.weights_error import WeightsError

_LOOK_S, _LOOK_LATER_S = 0.01, 0.2  # between looks for an object that another brings: at first, at most


class SiteStore:
    """A store over cache and origin. `may_fetch`: whether a missing object is fetched, else it is awaited."""

    def __init__(
        self, cache: Store, origin: OriginStore, stop: threading.Event | None = None,
        *, may_fetch: Callable[[str], bool] = lambda key: True,
    ) -> None:  # fmt: skip
        self._cache, self._origin, self.may_fetch = cache, origin, may_fetch
        self._stop = stop or threading.Event()
        self._near: set[str] = set()
        self.url = cache.url
        self.ways: Mapping[str, Way] = {}  # the planned way to each chunk, by key
        self.broken = ""  # the cache's newest error; empty: it works

    def get(self, key: str, size: int | None = None) -> bytes:
        """Return an object from the cache or the origin. Raise Missing if neither has it."""
        if (found := self._cached(key, size)) is not None:
            return found
        if "/chunks/" in key:
            return self._brought(key, size)
        if not key.endswith("/manifest.json") and "/keyframes/" not in key:
            raise Missing(f"{self.url}/{key} is not there")
        if (found := self._awaited(key, lambda: self.may_fetch(key))) is not None:
            return found
        data = self._origin.get(key, most=size)
        self.keep(key, data)
        return data

    def get_part(self, key: str, at: int, size: int) -> bytes:
        """Return some bytes of an object that is in the cache."""
        return self._cache.get_part(key, at, size)

    def near(self, key: str) -> bool:
        """Return whether an object is in the cache; False if the cache does not work."""
        if key not in self._near:
            try:
                if not self._cache.exists(key):
                    return False
            except StoreError:
                return False
            self._near.add(key)
        return True

    def source_of(self, key: str) -> str:
        """Return the site that a chunk is planned to come from; empty if the plan does not name the chunk."""
        way = self.ways.get(key)
        return way.site if way else ""

    def bring(self, key: str, size: int) -> bool:
        """Fetch a chunk at its planned time. Return False if another process of the site fetches it."""
        if (way := self.ways.get(key)) is not None:
            self._stop.wait(max(0.0, way.not_before - time.monotonic()))
        if not self.near(key):
            claim = Claim(self._cache, key.rpartition("/")[2])
            if not claim.taken():
                return False
            self._fetched(key, size, claim)
        return True

    def keep(self, key: str, data: bytes) -> None:
        """Put an object of the origin into the cache. An error is only noted."""
        try:
            with contextlib.suppress(Exists):
                self._cache.put_new(key, data)
            self.broken = ""
        except StoreError as error:  # a full disk, say
            self.broken = str(error)

    def put(self, key: str, data: bytes) -> None:
        """Put a reader's note into the cache. An error is only noted: readers can do without the note."""
        try:
            self._cache.put(key, data)
        except StoreError as error:
            self.broken = str(error)

    def put_parts(self, key: str, parts: Iterable[bytes | memoryview], size: int) -> None:
        """Write an object to the cache."""
        self._cache.put_parts(key, parts, size)

    def size(self, key: str) -> int:
        """Return the bytes of an object that is in the cache."""
        return self._cache.size(key)

    def put_new(self, key: str, data: bytes) -> None:
        self._cache.put_new(key, data)

    def exists(self, key: str) -> bool:
        return self._cache.exists(key)

    def list(self, prefix: str) -> list[str]:
        """Return the keys in the cache; of keyframes, those at the origin too, even without the cache."""
        if not prefix.endswith("/keyframes"):
            return self._cache.list(prefix)
        found = set[str]()
        try:
            found.update(self._cache.list(prefix))
        except StoreError as error:
            self.broken = str(error)
        with contextlib.suppress(StoreError):  # then those in the cache have to do
            found.update(self._origin.store.list(prefix))
        return sorted(found)

    def delete(self, key: str) -> None:
        """Delete an object of the cache. An error is only noted: a cache that does not work stops nobody."""
        self._near.discard(key)
        try:
            self._cache.delete(key)
        except StoreError as error:
            self.broken = str(error)

    def sweep(self, prefix: str, *, file_grace_s: float, upload_grace_s: float) -> int:
        """Remove what killed writes left in the cache, and return how many; and what dead relays left."""
        self._origin.sweep()
        sweep_claims(self._cache)
        return sweep(self._cache, prefix, file_grace_s=file_grace_s, upload_grace_s=upload_grace_s)

    @property
    def origin(self) -> OriginStore:
        """The origin, with what is not in the cache."""
        return self._origin

    def _cached(self, key: str, size: int | None = None) -> bytes | None:
        try:
            data = self._cache.get(key, size)
        except Missing:
            self._near.discard(key)
            return None
        except StoreError as error:
            self.broken = str(error)
            return None
        if "/chunks/" in key and not _as_named(key, data):
            self.delete(key)  # damaged: it is brought again
            return None
        return data

    def _brought(self, key: str, size: int | None) -> bytes:
        claim = Claim(self._cache, key.rpartition("/")[2])
        try:
            found = self._awaited(key, lambda: self.may_fetch(key) and claim.taken())
            return found if found is not None else self._fetched(key, size, claim)
        except StoreError as error:
            if isinstance(error, Missing) or self._stop.is_set():
                raise
            self.broken = str(error)
            return self._origin.get(key, size)

    def _awaited(self, key: str, ours: Callable[[], bool]) -> bytes | None:
        """Return an object once another process has brought it; None once `ours` says to fetch it here."""
        look_s = _LOOK_S
        while not ours():
            if self._stop.wait(look_s):
                raise StoreError(f"told to stop while {self.url}/{key} was awaited")
            if (found := self._cached(key)) is not None:
                return found
            look_s = min(look_s * 1.2, _LOOK_LATER_S)
        return None

    def _fetched(self, key: str, size: int | None, claim: Claim) -> bytes:
        """Fetch an object under our claim, unless another process put it into the cache just before."""
        with contextlib.ExitStack() as stack:
            stack.callback(_quietly, claim.release)
            if (found := self._cached(key)) is not None:
                return found
            data = self._from_afar(key, size, lambda: _quietly(claim.renew))
            self.keep(key, data)
            self._origin.forget(key)
            return data

    def _from_afar(self, key: str, size: int | None, alive: Callable[[], None]) -> bytes:
        way = self.ways.get(key)
        if way is not None:
            data = way.get(key, size, alive)
            if data is not None and _as_named(key, data):
                return data
            self._origin.forget(key)
        data = self._origin.get(key, size, alive=alive)
        if not _as_named(key, data):
            self._origin.forget(key)
            raise WeightsError(
                f"{self._origin.store.url}/{key} is damaged: it has other bytes than its name says"
            )
        return data


def _as_named(key: str, data: bytes) -> bool:
    return blake3(data).hexdigest() == key.rpartition("/")[2]


def _quietly(do: Callable[[], None]) -> None:
    with contextlib.suppress(StoreError):  # a claim that can't be written costs bytes at the worst
        do()

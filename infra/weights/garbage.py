"""What of the weights may go: versions that nobody needs, and then the chunks that no version names.

It may be killed anywhere, and begun by several at once. Manifests go first, the oldest first, so that none
needs one that is gone; a chunk goes when none has named it for a while. Who reads or publishes a version
holds a lease on it, and loses nothing under its hands: no chunk goes while somebody puts some.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from infra.store import Missing, Store
from infra.weights.manifest import Manifest

GRACE_S = 120.0  # that a chunk stays when no version names it
_LEASE_S = 600.0  # since it was renewed, by another machine's clock
_RENEW_S = 60.0

Progress = Callable[[int, int], None]  # bytes so far, and in all


class Lease:
    """Keeps a version, and what leads to it, while it is being read or published."""

    def __init__(
        self, store: Store, prefix: str, version: int, holder: str = "", *, puts: bool = False
    ) -> None:
        """`puts`: what is put meanwhile, no version names yet."""
        self._store, self._version, self._puts = store, version, puts
        self._key = f"{prefix}/leases/{holder or uuid.uuid4().hex}.json"
        self._renewed = -math.inf

    def __enter__(self) -> Lease:
        self.renew()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.delete(self._key)

    def renewing(self, progress: Progress) -> Progress:
        """The same progress, by which the lease is renewed."""

        def renew(done: int, whole: int) -> None:
            self.renew()
            progress(done, whole)

        return renew

    def renew(self) -> None:
        """Say that somebody is still at it."""
        if time.monotonic() - self._renewed < _RENEW_S:
            return
        self._renewed = time.monotonic()
        said = {"version": self._version, "at": time.time(), "puts": self._puts}
        self._store.put(self._key, json.dumps(said).encode())


@dataclass
class Collected:
    """What was removed, and what is left."""

    kept: list[int] = field(default_factory=list)  # versions
    removed: list[int] = field(default_factory=list)
    chunks: int = 0  # that were removed
    waiting: int = 0  # chunks that no version names: they go later
    size: int = 0  # bytes that the versions need


def collect(
    store: Store, prefix: str, manifests_of: Callable[[], Mapping[int, Manifest]], keep: int,
    *, grace_s: float = GRACE_S,
) -> Collected:  # fmt: skip
    """Remove what is not needed by the newest versions, by two keyframes, or by who is reading."""
    leased, putting = _leased(store, prefix)
    manifests = manifests_of()  # only now: what was published since is seen
    versions = sorted(manifests)
    if not versions:
        return Collected()
    keyframes = [version for version in versions if manifests[version].path(None) is not None]
    wanted = [versions[-keep:][0], *leased]
    needed = [max((key for key in keyframes if key <= version), default=0) for version in wanted]
    oldest = min([*needed, *keyframes[-2:]])
    found = Collected(
        [version for version in versions if version >= oldest], [one for one in versions if one < oldest]
    )
    for key in store.list(f"{prefix}/keyframes"):  # also of versions that went before, by who was killed then
        number = key.rpartition("/v")[2].removesuffix(".json")
        if number.isdecimal() and int(number) < oldest:
            store.delete(key)
    for version in found.removed:
        store.delete(manifest_key(prefix, version))
    kept = [manifests[version] for version in found.kept]
    named = {chunk.hash: chunk.size for manifest in kept for chunk in manifest.chunks}
    found.size = sum(named.values())
    if not putting:
        found.chunks, found.waiting = _sweep(store, prefix, named, grace_s)
    return found


def manifest_key(prefix: str, version: int) -> str:
    """Where a version's manifest lies."""
    return f"{prefix}/v{version:06d}/manifest.json"


def keyframe_key(prefix: str, version: int) -> str:
    """Where a way from nothing lies that a version was given later."""
    return f"{prefix}/keyframes/v{version:06d}.json"


def _leased(store: Store, prefix: str) -> tuple[list[int], bool]:
    """The versions that somebody reads, and whether anybody puts chunks."""
    found, putting = [], False
    for key in store.list(f"{prefix}/leases"):
        try:
            said = json.loads(store.get(key))
            version, at, puts = int(said["version"]), float(said["at"]), bool(said["puts"])
        except Missing:
            continue  # given back since it was listed
        except (ValueError, KeyError, TypeError):
            version, at, puts = 0, 0.0, False
        if abs(time.time() - at) < _LEASE_S:
            found.append(version)
            putting |= puts
        else:
            store.delete(key)  # of a reader that died
    return found, putting


def _sweep(store: Store, prefix: str, named: Collection[str], grace_s: float) -> tuple[int, int]:
    """Chunks that no version names are noted, and go when they have been noted for a while."""
    notes, now = f"{prefix}/garbage.json", time.time()
    try:
        since = {str(name): float(when) for name, when in json.loads(store.get(notes)).items()}
    except (Missing, ValueError, AttributeError, TypeError):
        since = {}
    left, gone = {}, 0
    for key in store.list(f"{prefix}/chunks"):
        name = key.rpartition("/")[2]
        if name in named:
            continue
        when = min(since.get(name, now), now)
        if now - when >= grace_s and not _leased(store, prefix)[1]:  # who puts may count on it from now on
            store.delete(key)
            gone += 1
        else:
            left[name] = when
    store.put(notes, json.dumps(left).encode())
    return gone, len(left)

"""What of the weights may go: versions that nobody needs, and then the chunks that no version names.

It may be killed anywhere, and begun by several at once. Manifests go first, the oldest first, so that none
needs one that is gone; a chunk goes when none has named it for a while. Who reads or publishes a version
holds a lease on it, and loses nothing under its hands.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType

from infra.store import Missing, Store
from infra.weights.manifest import Manifest

GRACE_S = 120.0  # that a chunk stays when no version names it
_LEASE_S = 600.0  # since it was renewed, by another machine's clock
_RENEW_S = 60.0

Progress = Callable[[int, int], None]  # bytes so far, and in all


class Lease:
    """Keeps a version, and what leads to it, while it is being read or published."""

    def __init__(self, store: Store, prefix: str, version: int, holder: str = "") -> None:
        self._store, self._version = store, version
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
        self._store.put(self._key, json.dumps({"version": self._version, "at": time.time()}).encode())


def collect(
    store: Store, prefix: str, manifests: Mapping[int, Manifest], keep: int, *, grace_s: float = GRACE_S
) -> None:
    """Remove what is not needed by the newest versions, by two keyframes, or by who is reading."""
    versions = sorted(manifests)
    if not versions:
        return
    keyframes = [version for version in versions if manifests[version].path(None) is not None]
    leased = _leased(store, prefix)
    wanted = [versions[-keep:][0], *leased]
    needed = [max((key for key in keyframes if key <= version), default=0) for version in wanted]
    oldest = min([*needed, *keyframes[-2:]])
    for version in versions:
        if version < oldest:
            store.delete(f"{prefix}/v{version:06d}/manifest.json")
    if not any(version > versions[-1] for version in leased):  # one that is being published names none yet
        _sweep(store, prefix, [manifests[version] for version in versions if version >= oldest], grace_s)


def _leased(store: Store, prefix: str) -> list[int]:
    found = []
    for key in store.list(f"{prefix}/leases"):
        try:
            said = json.loads(store.get(key))
            version, at = int(said["version"]), float(said["at"])
        except Missing:
            continue  # given back since it was listed
        except (ValueError, KeyError, TypeError):
            version, at = 0, 0.0
        if abs(time.time() - at) < _LEASE_S:
            found.append(version)
        else:
            store.delete(key)  # of a reader that died
    return found


def _sweep(store: Store, prefix: str, manifests: list[Manifest], grace_s: float) -> None:
    """Chunks that no version names are noted, and go when they have been noted for a while."""
    named = {chunk.hash for manifest in manifests for path in manifest.paths for chunk in path.chunks}
    named |= {chunk.hash for manifest in manifests for chunk in manifest.files.values()}
    notes, now = f"{prefix}/garbage.json", time.time()
    try:
        since = {str(name): float(when) for name, when in json.loads(store.get(notes)).items()}
    except (Missing, ValueError, AttributeError, TypeError):
        since = {}
    left = {}
    for key in store.list(f"{prefix}/chunks"):
        name = key.rpartition("/")[2]
        if name in named:
            continue
        when = min(since.get(name, now), now)
        if now - when >= grace_s:
            store.delete(key)
        else:
            left[name] = when
    store.put(notes, json.dumps(left).encode())

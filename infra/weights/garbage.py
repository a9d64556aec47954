"""What of the weights may go: versions that nobody needs, and then the chunks that no version names.

It may be killed anywhere, and begun by several at once. Manifests go first, the oldest first, so that none
needs one that is gone; a chunk goes when none has named it for a while. Who reads or publishes a version
holds a lease on it, and loses nothing under its hands: no chunk goes while somebody puts some.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from infra.stores.store import Store
from infra.weights.leases import leased
from infra.weights.manifest import VersionManifest
from infra.weights.notes import StoreNotes

COLLECT_GRACE_S = 120.0  # that a chunk stays when no version names it

ByteProgress = Callable[[int, int], None]  # bytes so far, and in all


@dataclass
class Collected:
    """What was removed, and what is left."""

    kept: list[int] = field(default_factory=list)  # versions
    removed: list[int] = field(default_factory=list)
    chunks: int = 0  # that were removed
    waiting: int = 0  # chunks that no version names: they go later
    size: int = 0  # bytes that the versions need


def collect_garbage(
    store: Store, prefix: str,
    manifests_of: Callable[[], tuple[Mapping[int, VersionManifest], Collection[int]]], keep: int, *,
    grace_s: float = COLLECT_GRACE_S,
) -> Collected:  # fmt: skip
    """Remove what is not needed by the newest versions, by two keyframes, or by who is reading."""
    reading, putting = leased(store, prefix)
    manifests, others = manifests_of()  # only now: what was published since is seen
    versions = sorted(manifests)
    if not versions:
        return Collected()
    keyframes = [version for version in versions if manifests[version].path(None) is not None]
    wanted = [versions[-keep:][0], *reading]
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
    if not putting and not others:  # what a version needs that can't be read here, nobody knows
        found.chunks, found.waiting = _sweep(store, prefix, named, grace_s)
    return found


def manifest_key(prefix: str, version: int) -> str:
    """Where a version's manifest lies."""
    return f"{prefix}/v{version:06d}/manifest.json"


def keyframe_key(prefix: str, version: int) -> str:
    """Where a way from nothing lies that a version was given later."""
    return f"{prefix}/keyframes/v{version:06d}.json"


def _sweep(store: Store, prefix: str, named: Collection[str], grace_s: float) -> tuple[int, int]:
    """Chunks that no version names are noted, and go when they have been noted for a while."""
    notes = StoreNotes(store, f"{prefix}/garbage.json")
    left, gone = [], 0
    for key in store.list(f"{prefix}/chunks"):
        name = key.rpartition("/")[2]
        if name in named:
            continue
        # who puts may count on it from now on
        if notes.age_s(name) >= grace_s and not leased(store, prefix)[1]:
            store.delete(key)
            gone += 1
        else:
            left.append(name)
    notes.save(left)
    return gone, len(left)

"""Collects garbage: removes versions that nobody needs, and then the chunks that no version names.

Collection may be killed at any moment, and several may run at once. Manifests are deleted first, the oldest
first; no version that is kept needs them. A chunk is deleted when no version has named it for a while. A
process that reads or publishes a version holds a lease on it, so that nothing it needs is deleted; no chunk
is deleted while somebody puts some.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from infra.stores.store import Store
from infra.weights.leases import leased
from infra.weights.manifest import VersionManifest
from infra.weights.notes import StoreNotes

COLLECT_GRACE_S = 120.0  # seconds that a chunk stays when no version names it

ByteProgress = Callable[[int, int], None]  # bytes so far, and in all (0: not known)


@dataclass
class Collected:
    """The result of a collection: what was removed, and what is left."""

    kept: list[int] = field(default_factory=list)  # versions
    removed: list[int] = field(default_factory=list)  # versions
    chunks: int = 0  # chunks that were removed
    waiting: int = 0  # chunks that no version names, to be removed later
    size: int = 0  # bytes of all chunks that the kept versions name


def collect_garbage(
    store: Store, prefix: str,
    manifests_of: Callable[[], tuple[Mapping[int, VersionManifest], Collection[int]]], keep: int, *,
    grace_s: float = COLLECT_GRACE_S,
) -> Collected:  # fmt: skip
    """Remove versions that neither the `keep` newest, two keyframes nor readers need, and then chunks.

    `manifests_of` returns the manifests, and the versions whose manifests can't be read: while there are any,
    no chunk is removed. `grace_s`: seconds that a chunk stays after it was first seen unnamed.
    """
    reading, putting = leased(store, prefix)
    manifests, others = manifests_of()  # after the leases: so versions published since are seen
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
    for key in store.list(f"{prefix}/keyframes"):  # also those that a killed collector left
        number = key.rpartition("/v")[2].removesuffix(".json")
        if number.isdecimal() and int(number) < oldest:
            store.delete(key)
    for version in found.removed:
        store.delete(manifest_key(prefix, version))
    kept = [manifests[version] for version in found.kept]
    named = {chunk.hash: chunk.size for manifest in kept for chunk in manifest.chunks}
    found.size = sum(named.values())
    if not putting and not others:  # an unreadable version may need any chunk
        found.chunks, found.waiting = _sweep(store, prefix, named, grace_s)
    return found


def manifest_key(prefix: str, version: int) -> str:
    """Return the key of a version's manifest."""
    return f"{prefix}/v{version:06d}/manifest.json"


def keyframe_key(prefix: str, version: int) -> str:
    """Return the key of the keyframe that a version was given after it was published."""
    return f"{prefix}/keyframes/v{version:06d}.json"


def _sweep(store: Store, prefix: str, named: Collection[str], grace_s: float) -> tuple[int, int]:
    """Delete chunks that no version has named for `grace_s`. Returns how many went, and how many wait."""
    notes = StoreNotes(store, f"{prefix}/garbage.json")
    left, gone = [], 0
    for key in store.list(f"{prefix}/chunks"):
        name = key.rpartition("/")[2]
        if name in named:
            continue
        # a publisher that began just now may count on this chunk
        if notes.age_s(name) >= grace_s and not leased(store, prefix)[1]:
            store.delete(key)
            gone += 1
        else:
            left.append(name)
    notes.save(left)
    return gone, len(left)

"""Finds the paths to a version that take the fewest bytes, from a version that is held or from nothing."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from infra.weights.manifest import Chunk, Path, VersionManifest

_REQUEST = 1 << 16  # bytes that could be fetched in the time of one more request
_NEARER = 16  # a chunk that is near costs so many times less

Paths = list[tuple[VersionManifest, Path]]


def cost(path: Path, near: Callable[[Chunk], bool] = lambda chunk: False) -> int:
    """Return a path's cost, in bytes that could be fetched in that time. `near`: which chunks are cheap."""
    far = [chunk.size + _REQUEST for chunk in path.chunks if not near(chunk)]
    whole = path.size + _REQUEST * len(path.chunks)
    return sum(far) + (whole - sum(far)) // _NEARER + (_REQUEST if far else _REQUEST // _NEARER)


def cheapest(
    target: VersionManifest, manifest_of: Callable[[int], VersionManifest | None],
    held: tuple[int, str] | None = None,
    cost_of: Callable[[Path], int] = cost,
) -> Paths | None:  # fmt: skip
    """Return the paths to take, in order: [] if the reader holds the target, None if nothing leads there.

    `held` is the version that the reader holds, and its root. `manifest_of` is called when a manifest is
    needed: manifests that only dearer paths would need are never read.
    """
    if held == (target.version, target.root):
        return []
    known: dict[int, VersionManifest | None] = {target.version: target}
    done: set[int] = set()
    number = itertools.count()  # of equal costs the first one found wins: paths can't be compared
    ahead: list[tuple[int, int, int, Paths, bool]] = [(0, next(number), target.version, [], False)]
    while ahead:
        so_far, _, version, paths, there = heapq.heappop(ahead)
        if there:
            return paths
        if version in done:
            continue
        done.add(version)
        if version not in known:
            known[version] = manifest_of(version)
        manifest = known[version]
        if manifest is None or (paths and manifest.root != paths[0][1].root):
            continue  # it was collected, or is of another series
        for path in manifest.paths:
            there = path.since is None or (path.since, path.root) == held
            further = so_far + cost_of(path)
            where = -1 if path.since is None else path.since
            heapq.heappush(ahead, (further, next(number), where, [(manifest, path), *paths], there))
    return None

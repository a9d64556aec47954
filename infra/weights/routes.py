"""The way to a version that takes the fewest bytes, from what a reader holds or from nothing."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from infra.weights.manifest import Manifest, Path

_REQUEST = 1 << 16  # bytes that could be fetched while another object is asked for

Route = list[tuple[Manifest, Path]]


def cheapest(
    target: Manifest, manifest_of: Callable[[int], Manifest | None], held: tuple[int, str] | None = None
) -> Route | None:
    """Paths to be taken one after the other: [] if the reader holds the target, None if nothing leads there.

    Manifests are asked for as they are needed: those that a dearer way would need never are.
    """
    if held == (target.version, target.root):
        return []
    known: dict[int, Manifest | None] = {target.version: target}
    done: set[int] = set()
    ahead: list[tuple[int, int, Route, bool]] = [(0, target.version, [], False)]
    while ahead:
        cost, version, route, there = heapq.heappop(ahead)
        if there:
            return route
        if version in done:
            continue
        done.add(version)
        if version not in known:
            known[version] = manifest_of(version)
        manifest = known[version]
        if manifest is None or (route and manifest.root != route[0][1].root):
            continue  # it was collected, or is of another series
        for path in manifest.paths:
            there = path.since is None or (path.since, path.root) == held
            further = cost + path.size + _REQUEST * (1 + len(path.chunks))
            where = -1 if path.since is None else path.since
            heapq.heappush(ahead, (further, where, [(manifest, path), *route], there))
    return None

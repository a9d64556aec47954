"""The root hash of each version whose samples may still come, from the trainer's own knowledge.

    own steps, steps taken again, the checkpoint ──► known
    older versions, if the checkpoint does not have them ──► the version's manifest

So a sample's version can be checked before its manifest is there, and whoever else writes to the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from schemas.runspec import RunSpec


class TrainerRoots:
    """Roots by version. Their number is bounded by how old a sample may be."""

    def __init__(self, spec: RunSpec, published: Callable[[int], str | None]) -> None:
        """`published`: returns a version's root as its manifest says; None if there is none."""
        most_stale = spec.algorithm.most_stale
        self._kept = int(most_stale) + 2 if math.isfinite(most_stale) else 2
        self._published = published
        self._known: dict[int, str] = {}
        self._asked: dict[int, str | None] = {}  # roots of other versions, as their manifests say

    def keep(self, version: int, root: str) -> None:
        """Keep the root of a version that the trainer has come to; forget versions that are too old."""
        self._known[version] = root
        self._known = {one: known for one, known in self._known.items() if one > version - self._kept}
        self._asked.clear()  # a version that had no manifest may have one by now

    def keep_all(self, known: Mapping[int, str]) -> None:
        """Keep the roots of all these versions."""
        for version in sorted(known):
            self.keep(version, known[version])

    def known(self) -> dict[int, str]:
        """Return the known roots, for a checkpoint."""
        return dict(self._known)

    def of(self, version: int) -> str | None:
        """Return a version's root; None if neither the trainer nor a manifest has it."""
        if version in self._known:
            return self._known[version]
        if version not in self._asked:
            if len(self._asked) >= 4 * self._kept:
                self._asked.clear()  # samples can name any version
            self._asked[version] = self._published(version)
        return self._asked[version]

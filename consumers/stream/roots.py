"""The root hash of each version whose samples may still come, from the trainer's own knowledge.

    own steps, steps taken again, the checkpoint ──► known
    older than those, as after a checkpoint that does not say them ──► the version's manifest

So what made a sample can be checked before its version's manifest stands, and whoever writes to the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from schemas.runspec import RunSpec


class TrainerRoots:
    """Bounded by how old a sample may be."""

    def __init__(self, spec: RunSpec, published: Callable[[int], str | None]) -> None:
        """`published`: a version's root as its manifest says; None if there is none."""
        lookahead = spec.algorithm.lookahead
        self._kept = math.ceil(lookahead) + 2 if math.isfinite(lookahead) else 2
        self._published = published
        self._known: dict[int, str] = {}
        self._asked: dict[int, str | None] = {}  # what manifests say of others

    def keep(self, version: int, root: str) -> None:
        """The trainer has come to a version."""
        self._known[version] = root
        self._known = {one: known for one, known in self._known.items() if one > version - self._kept}
        self._asked.clear()  # a newer one may stand by now

    def keep_all(self, known: Mapping[int, str]) -> None:
        """What a checkpoint says, or a trainer that has gone on."""
        for version in sorted(known):
            self.keep(version, known[version])

    def known(self) -> dict[int, str]:
        """What a checkpoint says."""
        return dict(self._known)

    def of(self, version: int) -> str | None:
        """A version's root; None if nobody knows it."""
        if version in self._known:
            return self._known[version]
        if version not in self._asked:
            if len(self._asked) >= 4 * self._kept:
                self._asked.clear()  # samples name whatever they like
            self._asked[version] = self._published(version)
        return self._asked[version]

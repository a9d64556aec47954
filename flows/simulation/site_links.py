"""Weights on their way to the sites: each byte crosses a site's link once."""

from __future__ import annotations

import numpy as np

from flows.planning.stage_times import LinkTimes


class SiteLink:
    """A site's way to new weights: one fetch at a time, of all that the newest version needs."""

    def __init__(
        self, link: LinkTimes | None, version_bytes: int, draw: np.random.Generator | None = None
    ) -> None:
        """`draw`: of how much TCP delays a fetch; without it each is delayed as in the mean."""
        self._link, self._version_bytes, self._draw = link, version_bytes, draw
        self._held, self._newest = 0, 0
        self._fetching: int | None = None
        self.bytes, self.seconds = 0, 0.0

    @property
    def held(self) -> int:
        """The newest version that the site has."""
        return self._held

    def announced(self, version: int) -> None:
        """Hear of a new version."""
        self._newest = version
        if self._link is None:
            self._held = version

    def fetch(self) -> float | None:
        """Begin to fetch the newest version. Return how many seconds it takes; None: there is nothing to do.

        A version is a delta of the one before, so those in between are fetched with it.
        """
        if self._link is None or self._fetching is not None or self._newest == self._held:
            return None
        size = (self._newest - self._held) * self._version_bytes
        delay = float(self._draw.choice(self._link.delays)) if self._draw is not None else None
        seconds = self._link.fetch_s(size, delay)
        self._fetching = self._newest
        self.bytes += size
        self.seconds += seconds
        return seconds

    def fetched(self) -> int:
        """End the fetch. Return the version that is here now."""
        assert self._fetching is not None, "nothing is being fetched"
        self._held, self._fetching = self._fetching, None
        return self._held

"""One sample to be made: what the dispatcher deals in and an engine works on."""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.messages import Part, Prompt

Key = tuple[int, int]  # group, index


@dataclass(frozen=True, slots=True)
class Job:
    """A sample of a group."""

    prompt: Prompt = field(repr=False)
    index: int
    part: Part | None = field(default=None, repr=False, compare=False)  # what another instance made of it

    @property
    def needs(self) -> int:
        """The weights version that it needs: with older ones it would not go on where it was."""
        newest = int(self.part.versions[-1]) if self.part is not None else 0
        return max(self.prompt.min_version, newest)

    @property
    def key(self) -> Key:
        """Which sample of the run it is."""
        return self.prompt.group, self.index

    @property
    def rank(self) -> tuple[int, float, int, int]:
        """Order of work: the oldest window first, then the longest."""
        return self.prompt.min_version, -self.prompt.predicted, self.prompt.group, self.index

"""One sample to be made: what the dispatcher deals in and an engine works on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.identity import SampleKey
from schemas.messages import EVAL, Part, Prompt

Turn = tuple[int, bool]  # whose turn it is: the lowest first


class RecordPlace(NamedTuple):
    """Where a record stands in its topic."""

    partition: int
    offset: int


class Placed(NamedTuple):
    """A prompt, and where it stands on `<run>.prompts`."""

    prompt: Prompt
    place: RecordPlace


@dataclass(frozen=True, slots=True)
class SampleJob:
    """A sample of a group."""

    prompt: Prompt = field(repr=False)
    index: int
    part: Part | None = field(default=None, repr=False, compare=False)  # what another instance made of it
    place: RecordPlace | None = field(default=None, repr=False, compare=False)  # of the prompt
    part_at: int = field(default=-1, repr=False, compare=False)  # where the part stands; -1: there is none

    @property
    def needs(self) -> int:
        """The weights version that it needs: with older ones it would not go on where it was."""
        newest = int(self.part.versions[-1]) if self.part is not None else 0
        return max(self.prompt.min_version, newest)

    @property
    def key(self) -> SampleKey:
        """Which sample of the run it is."""
        return self.prompt.group, self.index

    @property
    def turn(self) -> Turn:
        """The oldest window first; an evaluation behind what is trained and needs the same weights.

        What needs newer weights comes behind it, so that it has its turn: nobody could overtake for ever.
        """
        return self.prompt.min_version, self.prompt.purpose == EVAL

    @property
    def rank(self) -> tuple[Turn, float, int, int]:
        """Order of work: by turn, then the longest."""
        return self.turn, -self.prompt.predicted, self.prompt.group, self.index

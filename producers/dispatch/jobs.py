"""A job: one sample to be made. The dispatcher gives jobs to generators, and their engines do them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.identity import SampleKey
from schemas.messages import EVAL, Part, Prompt

Turn = tuple[int, bool]  # the lowest comes first


class RecordPlace(NamedTuple):
    """The partition and offset of a record in its topic."""

    partition: int
    offset: int


class Placed(NamedTuple):
    """A prompt, and its place on `<run>.prompts`."""

    prompt: Prompt
    place: RecordPlace


@dataclass(frozen=True, slots=True)
class SampleJob:
    """A job: one sample of a group."""

    prompt: Prompt = field(repr=False)
    index: int
    part: Part | None = field(default=None, repr=False, compare=False)  # as far as another generator made it
    place: RecordPlace | None = field(default=None, repr=False, compare=False)  # of the prompt
    part_at: int = field(default=-1, repr=False, compare=False)  # the part's offset; -1: there is none
    # the sample's group and index: one object, since every table of the dispatcher is by it
    key: SampleKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.prompt.group, self.index))

    @property
    def needs(self) -> int:
        """The oldest version of the weights that may make the sample, or go on with its part."""
        newest = int(self.part.versions[-1]) if self.part is not None else 0
        return max(self.prompt.min_version, newest)

    @property
    def turn(self) -> Turn:
        """The turn: jobs whose prompts need the oldest version come first; of these, evaluations come last.

        Jobs that need newer weights come later, so that no evaluation can be overtaken for ever.
        """
        return self.prompt.min_version, self.prompt.purpose == EVAL

    @property
    def order_key(self) -> tuple[Turn, float, int, int]:
        """The order of work: by turn, then the longest prediction first."""
        return self.turn, -self.prompt.predicted, self.prompt.group, self.index

"""Segments: each is a small object, written last, that commits a part of an archive.

archive/<run>/index/00000012.json     segment 12: which offsets it has, in which files, with digests
archive/<run>/samples/iteration=000007/00000012-<digest>.parquet    a file of it

Segments are numbered without gaps, so the newest is found by doubling, and the one with an offset by halving:
each says up to where all segments before it go. No reader and no writer has to read them all.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from infra.archive.archived_topics import KINDS
from infra.errors import Explained
from infra.keys import KeyRing
from infra.sealed import sealed, unseal

ARCHIVES = "archive"  # the folder of all archives in a store
LARGEST_SEGMENT = 8 << 20  # bytes
_LARGEST_FILE = 256 << 20
MOST_ROWS = 1 << 20  # of a file
_FORMAT = 1
_KIND = "archive"  # of the content that is signed

Position = Annotated[int, Field(ge=0, lt=1 << 62)]
PartitionNumber = Annotated[int, Field(ge=0, lt=1 << 15)]


class ArchiveError(Explained):
    """An archive that can't be written or read; the message names the object and what is wrong with it."""


class _Written(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ArchivedSpan(_Written):
    """How far a partition is archived."""

    topic: Annotated[str, Field(max_length=64)]  # its short name, such as `samples`
    partition: PartitionNumber
    since: Position  # from here on nothing is missing
    begin: Position  # where this segment goes on; what is before it is in earlier segments
    end: Position

    @model_validator(mode="after")
    def _is_in_order(self) -> ArchivedSpan:
        if self.topic not in KINDS:
            raise ValueError(f"no topic {self.topic[:32]!r} is archived")
        if not self.since <= self.begin <= self.end:
            raise ValueError(f"{self.topic}[{self.partition}] goes from {self.begin} to {self.end}")
        return self


class FilePart(_Written):
    """The records of one partition in a file."""

    partition: PartitionNumber
    first: Position
    last: Position
    rows: Annotated[int, Field(ge=1, le=MOST_ROWS)]

    @model_validator(mode="after")
    def _has_room(self) -> FilePart:
        if self.last - self.first < self.rows - 1:
            raise ValueError(f"{self.rows} records do not fit between {self.first} and {self.last}")
        return self


class ArchiveFile(_Written):
    """A Parquet file of a segment."""

    topic: Annotated[str, Field(max_length=64)]
    name: Annotated[str, Field(max_length=256)]  # its key behind `archive/<run>/`
    size: Annotated[int, Field(ge=1, le=_LARGEST_FILE)]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    record_bytes: Position  # of its records in the log
    parts: Annotated[tuple[FilePart, ...], Field(min_length=1, max_length=1 << 15)]

    @property
    def rows(self) -> int:
        """The number of its records."""
        return sum(one.rows for one in self.parts)

    def part(self, partition: int) -> FilePart | None:
        """Return the records of one partition; None if it has none."""
        return next((one for one in self.parts if one.partition == partition), None)


class Segment(_Written):
    """A part of an archive that was committed at once."""

    format: Literal[1]
    run: Annotated[str, Field(min_length=1, max_length=512)]
    identity: Annotated[str, Field(max_length=512)]  # of the run, as its record says
    number: Position
    made_at: Annotated[float, Field(allow_inf_nan=False)]
    spans: Annotated[
        tuple[ArchivedSpan, ...], Field(max_length=1 << 17)
    ]  # of all partitions, also where none came
    files: Annotated[tuple[ArchiveFile, ...], Field(max_length=1 << 14)]

    @model_validator(mode="after")
    def _is_whole(self) -> Segment:
        spans = {(one.topic, one.partition): one for one in self.spans}
        if len(spans) < len(self.spans) or len({one.name for one in self.files}) < len(self.files):
            raise ValueError("it names something twice")
        for file in self.files:
            if not self.may_name(file):
                raise ValueError(f"{file.name[:100]!r} is no name of a file of segment {self.number}")
            if file.rows > MOST_ROWS or len({one.partition for one in file.parts}) < len(file.parts):
                raise ValueError(f"{file.name} has too many rows, or a partition twice")
            for part in file.parts:
                span = spans.get((file.topic, part.partition))
                if span is None or not span.begin <= part.first <= part.last < span.end:
                    raise ValueError(f"{file.name} has records that segment {self.number} does not have")
        return self

    @property
    def first_number(self) -> int:
        """The number of the first segment that it stands for."""
        return self.number

    def may_name(self, file: ArchiveFile) -> bool:
        """Whether a file of this segment may have this name."""
        pattern = pattern_of_file(self.number)
        return bool(re.fullmatch(pattern, file.name)) and file.topic == file.name.split("/")[0]

    def span(self, topic: str, partition: int) -> ArchivedSpan | None:
        """Return how far a partition is archived; None if it is not."""
        return next((one for one in self.spans if (one.topic, one.partition) == (topic, partition)), None)


SegmentKind = TypeVar("SegmentKind", bound=Segment)


def pattern_of_file(number: int) -> str:
    """Return the pattern of the names that files of a segment may have."""
    topics = "|".join(KINDS)
    return rf"({topics})/(iteration|offset)=(\d{{6,20}}|mixed)/{number:08d}-[0-9a-f]{{16}}\.parquet"


def segment_key(run: str, number: int) -> str:
    """Return the key of a segment."""
    return f"{ARCHIVES}/{run}/index/{number:08d}.json"


def file_key(run: str, file: ArchiveFile) -> str:
    """Return the key of a file."""
    return f"{ARCHIVES}/{run}/{file.name}"


def segment_bytes(segment: Segment, ring: KeyRing) -> bytes:
    """Return a segment as it is written: canonical JSON with a digest, and a signature if there is a key."""
    raw = sealed(segment.model_dump(mode="json"), ring, _KIND)
    if len(raw) > LARGEST_SEGMENT:
        raise ArchiveError(
            f"segment {segment.number} of {segment.run} would have {len(raw):,} bytes: too many"
        )
    return raw


def read_segment(
    raw: bytes, run: str, identity: str, number: int, where: str, ring: KeyRing,
    kind: type[SegmentKind],
) -> SegmentKind:  # fmt: skip
    """Parse and check a segment. Raises ArchiveError, or KeysError if no trusted key has signed it."""
    try:
        if len(raw) > LARGEST_SEGMENT:
            raise ValueError(f"it has more than {LARGEST_SEGMENT:,} bytes")
        said = json.loads(raw)
        if not isinstance(said, dict):
            raise ValueError("it is no JSON object")
        if (form := said.get("format")) != _FORMAT:
            raise ArchiveError(
                f"{where} has format {str(form)[:20]}; this version of StreamRL reads format {_FORMAT}"
            )
        unseal(said, ring, where, _KIND)
        found = kind.model_validate(said)
        if (found.run, found.number) != (run, number):
            raise ValueError(f"it is segment {found.number} of run {found.run[:100]}")
    except (ValidationError, ValueError, RecursionError) as error:
        raise ArchiveError(f"{where} is no usable segment of an archive: {str(error)[:500]}") from error
    if found.identity != identity:
        raise ArchiveError(
            f"{where} is of another run of the name {run}, which was removed since: delete the folder "
            f"{ARCHIVES}/{run} of the store, or move it away"
        )
    return found

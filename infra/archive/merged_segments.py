"""Merged segments: each takes the place of many segments in a row, and has fewer and larger files.

archive/<run>/merged/00000000-00000015.json     takes the place of segments 0 to 15

The segments themselves stay as an index; only their files are removed, once nobody reads them any more.
"""

from __future__ import annotations

import re

from pydantic import model_validator

from infra.archive.segments import ARCHIVES, ArchiveFile, Position, Segment
from infra.stores.store import Store

MergedPlace = tuple[int, int]  # the numbers of the first and the last segment


class MergedSegment(Segment):
    """All that some segments in a row have, committed at once. Its number is that of the last one."""

    first: Position

    @property
    def first_number(self) -> int:
        """The number of the first segment whose place it takes."""
        return self.first

    def may_name(self, file: ArchiveFile) -> bool:
        """Whether a file may have this name: it was merged, or belongs to one of the segments."""
        found = re.fullmatch(merged_pattern(), file.name)
        if found is None or found["topic"] != file.topic:
            return False
        first, last = int(found["first"]), int(found["last"] or found["first"])
        return self.first <= first <= last <= self.number

    @model_validator(mode="after")
    def _is_in_a_row(self) -> MergedSegment:
        if not self.first < self.number:
            raise ValueError(f"it merges segments {self.first} to {self.number}")
        return self


def merged_pattern() -> str:
    """Return the pattern of the names that files of a merged segment may have."""
    return (
        r"(?P<topic>[a-z]{1,64})/(?P<folder>(iteration|offset)=(\d{6,20}|mixed))/"
        r"(?P<first>\d{8,18})(-(?P<last>\d{8,18}))?-[0-9a-f]{16}\.parquet"
    )


def merged_key(run: str, place: MergedPlace) -> str:
    """Return the key of a merged segment."""
    return f"{ARCHIVES}/{run}/merged/{place[0]:08d}-{place[1]:08d}.json"


def merged_places(store: Store, run: str) -> list[MergedPlace]:
    """Return which merged segments there are."""
    folder = f"{ARCHIVES}/{run}/merged"
    found = (
        re.fullmatch(rf"{re.escape(folder)}/(\d{{8,18}})-(\d{{8,18}})\.json", key)
        for key in store.list(folder)
    )
    return [(int(one[1]), int(one[2])) for one in found if one is not None]


def covering(places: list[MergedPlace], count: int) -> list[MergedPlace]:
    """Return as few places as cover the segments before `count`; one segment is a place, too."""
    widest: dict[int, int] = {}
    for first, last in places:
        if last < count:
            widest[first] = max(last, widest.get(first, first))
    found, at = list[MergedPlace](), 0
    while at < count:
        last = widest.get(at, at)
        found.append((at, last))
        at = last + 1
    return found

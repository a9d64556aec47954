"""Samples that can't be used: to the dead letters with the reason, once each; what is needed is made again.

<run>.samples ──► trainer: unfit ──► <run>.dead ──► dispatcher: who makes it again ──► <run>.samples

A sample that is made again and again and is never fit would be waited for in vain: that ends the run, and
says what was wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from infra.bus import Record, read_all
from infra.errors import Explained
from infra.process import Context
from schemas.admission import window_of
from schemas.identity import sample_id, sample_key
from schemas.messages import DeadLetter, Prompt
from schemas.wire import Unreadable, decode

_TIMES = 3


class NeverFit(Explained):
    """A sample that the run needs and that was unfit each time."""


class Unfit:
    """Writes the dead letters of a run's samples."""

    def __init__(self, context: Context, is_missing: Callable[[int, int, int], bool]) -> None:
        """`is_missing`: whether a sample (group, index, iteration) is not there and still needed."""
        self._context, self._is_missing = context, is_missing
        self._known = _letters(context)  # a trainer that starts again meets the same records again
        self._seen: dict[str, set[bytes]] = {}  # by sample: what came in its place and was not fit

    def put(self, record: Record, reason: str, *, ours: bool = True) -> None:
        """A record can't be used; `ours`: it may be what came of a sample that this run has had made."""
        if (record.partition, record.offset) in self._known:
            return
        self._known.add((record.partition, record.offset))
        wanted = self._missing(record.key) if ours else ""
        self._context.dead_letter(record, reason, wanted=wanted)
        if not wanted:
            return
        seen = self._seen.setdefault(wanted, set())
        seen.add(record.value)
        if len(seen) >= _TIMES:
            self._context.writer.flush(self._context.spec.deadlines.progress_s)
            raise NeverFit(
                f"sample {wanted} was made {len(seen)} times and was never fit to be trained; the last time: "
                f"{reason}. All that came of it is in {self._context.topics.dead.name}; its generators' logs "
                "may say more"
            )

    def _missing(self, key: bytes) -> str:
        """The id of the sample that a record stands for by its key, if it is needed; else empty."""
        algorithm = self._context.spec.algorithm
        try:
            name = key.decode()
            group, index = sample_key(name)
        except ValueError:
            return ""
        if sample_id(group, index) != name or not 0 <= index < algorithm.group_size:
            return ""
        if group < 0:
            return name  # of an evaluation: whether it is there the feeder knows, and twice does no harm
        window = window_of(group, algorithm.groups)
        if window >= algorithm.iterations or not self._is_missing(group, index, window):
            return ""
        return name


def _letters(context: Context) -> set[tuple[int, int]]:
    """Partition and position of each sample that is a dead letter already."""
    found = set()
    deadline_s = context.spec.deadlines.progress_s
    for record in read_all(context.bus, context.topics.dead, deadline_s=deadline_s):
        try:
            letter = decode(record.value, DeadLetter)
        except Unreadable:
            continue  # the worst that can come of it is a second letter
        if letter.topic == context.topics.samples.name:
            found.add((letter.partition, letter.offset))
    return found


def admitted(context: Context, groups: Collection[int]) -> dict[int, Prompt]:
    """What was admitted as these groups. Reads the whole topic: for when samples contradict each other."""
    found = {}
    deadline_s = context.spec.deadlines.progress_s
    for record in read_all(context.bus, context.topics.prompts, deadline_s=deadline_s):
        try:
            prompt = decode(record.value, Prompt)
        except Unreadable:
            continue
        if prompt.group in groups and prompt.run == context.run:
            found[prompt.group] = prompt
    return found

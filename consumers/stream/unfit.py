"""Samples that can't be used: each gets one dead letter with the reason; needed ones are made again.

<run>.samples ──► trainer: unfit ──► <run>.dead ──► dispatcher: has it made again ──► <run>.samples

The trainer would wait in vain for a sample that is made again and again and is never fit. So after three
unfit ones the run ends, and says what was wrong. Anybody may have written garbage under a sample's key:
however much of it there is, it counts once in the time in which something fit should have come.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping

from infra.bus import Record, clamp, read_until
from infra.errors import Explained
from infra.gate import Gate, passed_over
from infra.roles.context import RoleContext
from schemas.admission import is_of_run, latest_iteration
from schemas.identity import sample_id, sample_key
from schemas.messages import DeadLetter, Sample
from schemas.wire import Contradictory, decode

_TIMES = 3
_NEWEST = 10_000  # dead letters that are read again if the position is not known


class NeverFit(Explained):
    """A sample that the run needs was unfit each time that it was made."""


class Unfit:
    """Writes dead letters about a run's samples, and knows the records that have one already."""

    def __init__(
        self, context: RoleContext, is_missing: Callable[[int, int, int], bool], start: Mapping[int, int],
        letters: int | None = 0,
    ) -> None:  # fmt: skip
        """`is_missing`: returns whether a sample (group, index, iteration) is not here and still needed.

        `start`: positions from which samples are read. `letters`: position in the dead letters; earlier ones
        are only about samples before `start`. None: not known.
        """
        self._context, self._is_missing, self._start, self._letters = context, is_missing, start, letters
        # by partition and offset of the sample: the position of its letter, or one before it
        self._known: dict[tuple[int, int], int] = {}
        self._seen: dict[str, set[bytes]] = {}  # by sample: hashes of what came in its place and was not fit
        self._garbage_at: dict[str, float] = {}  # by sample: when garbage in its place counted last

    def open(self) -> Unfit:
        """Read the dead letters that there are. Return itself."""
        start = None if self._letters is None else {0: self._letters}
        self._reader = self._context.bus.reader(self._context.topics.dead, start)
        self._end = self._read(self._start, self._letters)  # a lower bound of the end of the dead letters
        return self

    def _read(self, start: Mapping[int, int], letters: int | None) -> int:
        """Read the letters that an earlier trainer wrote about samples from `start` on, which are read again.

        Returns the end of the dead letters.
        """
        topic, reader = self._context.topics.dead, self._reader
        ends = reader.end_offsets()
        if letters is None:
            reader.seek({0: max(reader.begin_offsets()[0], ends[0] - _NEWEST)})
        clamp(reader)
        gate = Gate(DeadLetter, self._context.run, passed_over)  # at worst a record gets a second letter
        found = read_until(reader, ends, topic, deadline_s=self._context.spec.deadlines.progress_s)
        for record, letter in gate.take(found):
            place = letter.partition, letter.offset
            if letter.topic == self._context.topics.samples.name and place[1] >= start.get(place[0], 0):
                self._known.setdefault(place, record.offset)
        return ends[0]

    def put(self, record: Record, reason: str, *, ours: bool = True) -> None:
        """Write a dead letter about a record, unless it has one.

        `ours`: the record may be a sample that this run has had made. Raises NeverFit at the third different
        unfit record in place of a sample that is needed.
        """
        if (record.partition, record.offset) in self._known:
            return
        self._known[record.partition, record.offset] = self._end
        wanted = self._missing(record.key) if ours else ""
        self._context.dead_letter(record, reason, wanted=wanted)
        if not wanted or sample_key(wanted)[0] < 0 or self._is_more_garbage(record, wanted):
            return  # a measurement never ends a run
        seen = self._seen.setdefault(wanted, set())
        seen.add(hashlib.blake2b(record.value, digest_size=16).digest())
        if len(seen) >= _TIMES:
            self._context.writer.flush(self._context.spec.deadlines.progress_s)
            raise NeverFit(
                f"sample {wanted} was made {len(seen)} times and was never fit to be trained; the last time: "
                f"{reason}. Its dead letters are in {self._context.topics.dead.name}; the generators' logs "
                "may say more"
            )

    def _is_more_garbage(self, record: Record, wanted: str) -> bool:
        """Return whether a record is no sample at all, and came soon after another such record."""
        try:
            decode(record.value, Sample)
        except Contradictory:
            return False
        except Exception:  # as in the gate: no record's content may end a process
            now, last = time.monotonic(), self._garbage_at.get(wanted, -math.inf)
            if now < last + self._context.spec.deadlines.progress_s:
                return True
            self._garbage_at[wanted] = now
        return False

    def trained(self) -> None:
        """Forget what came in place of samples that are not needed any more, as an iteration is done."""
        self._seen = {name: seen for name, seen in self._seen.items() if self._missing(name.encode())}
        self._garbage_at = {name: at for name, at in self._garbage_at.items() if name in self._seen}

    def settled(self, marks: Mapping[int, int]) -> int:
        """Return a position in the dead letters; those before it are only about samples before `marks`."""
        self._known = {place: at for place, at in self._known.items() if place[1] >= marks.get(place[0], 0)}
        self._end = max(self._end, self._reader.end_offsets()[0])
        return min(self._known.values(), default=self._end)

    def _missing(self, key: bytes) -> str:
        """Return the id of the sample that a record's key names, if it is needed; else an empty string."""
        algorithm = self._context.spec.algorithm
        try:
            name = key.decode()
            group, index = sample_key(name)
        except ValueError:
            return ""
        size = algorithm.group_size if group >= 0 else self._context.spec.evaluation.per_problem
        if sample_id(group, index) != name or not 0 <= index < size:
            return ""
        if group < 0:
            return name  # of an evaluation: the feeder knows whether it is there, and twice does no harm
        if not is_of_run(group, algorithm):
            return ""
        if not self._is_missing(group, index, latest_iteration(group, algorithm)):
            return ""
        return name

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

"""What a generator is told to do.

<run>.assignments ── key: is it for me? ── gate ── start, epoch ──► Work: make, give back, hand over
                             <run>.prompts, <run>.parts, by position ──┘

Others' assignments on the same partition are passed over by their keys alone. Of a dispatcher older than the
newest that was heard nothing is taken: it was replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.bus import Record
from infra.gate import Gate
from infra.roles.context import RoleContext
from producers.dispatch.jobs import RecordPlace, SampleJob
from producers.stored import Stored
from schemas.messages import EVERYONE, Assignment, Part, Prompt

_KEPT_BYTES = 32 << 20  # of prompts


@dataclass(frozen=True)
class Work:
    """What one assignment says."""

    jobs: list[SampleJob] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    moving: list[str] = field(default_factory=list)
    tell: bool = False  # the dispatcher asks what there is


class Assigned:
    """Makes work of records. Used by one thread."""

    def __init__(self, context: RoleContext, start: str) -> None:
        self._context, self._start = context, start
        self._mine = {context.name, EVERYONE}
        self._gate = Gate(Assignment, context.run, context.dead_letter)
        self._epoch = 0
        self._fetcher = context.bus.fetcher()
        topics, deadline_s = context.topics, context.spec.deadlines.progress_s
        self._prompts = Stored(
            self._fetcher, topics.prompts, Prompt, context.run, most_bytes=_KEPT_BYTES, deadline_s=deadline_s
        )
        self._parts = Stored(
            self._fetcher, topics.parts, Part, context.run, most_bytes=0, deadline_s=deadline_s
        )

    def read(self, records: list[Record]) -> list[Work]:
        """The work in records, in order."""
        work = []
        for record, assignment in self._gate.take(record for record in records if record.name in self._mine):
            if assignment.instance != record.name or assignment.epoch < self._epoch:
                continue
            self._epoch = assignment.epoch
            if assignment.instance == EVERYONE:
                work.append(Work(tell=assignment.tell))
            elif assignment.start == self._start:
                jobs = self._jobs(record, assignment)
                work.append(Work(jobs, assignment.withdrawn, assignment.moving, assignment.tell))
        return work

    def close(self) -> None:
        """Let go."""
        self._fetcher.close()

    def _jobs(self, record: Record, assignment: Assignment) -> list[SampleJob]:
        """Those of its rows that are what they say; of the others the first one goes to the dead letters."""
        places = [
            RecordPlace(*at)
            for at in zip(assignment.partitions.tolist(), assignment.offsets.tolist(), strict=True)
        ]
        prompts = self._prompts.get(set(places))
        parts = self._parts.get({RecordPlace(0, at) for at in assignment.parts.tolist() if at >= 0})
        rows = zip(
            places, assignment.groups.tolist(), assignment.indexes.tolist(), assignment.parts.tolist(),
            strict=True,
        )  # fmt: skip
        jobs: list[SampleJob] = []
        wrong: list[str] = []
        for place, group, index, at in rows:
            prompt = prompts[place]
            if isinstance(prompt, str):
                wrong.append(prompt)
            elif prompt.group != group or not 0 <= index < prompt.size:
                wrong.append(
                    f"sample {index} of group {group} is none of group {prompt.group}, of {prompt.size} "
                    f"samples, which stands at {self._context.topics.prompts.name}[{place[0]}]@{place[1]}"
                )
            else:
                jobs.append(
                    SampleJob(prompt, index, self._part(parts.get(RecordPlace(0, at)), group, index), place)
                )
        if wrong:
            self._context.dead_letter(
                record, f"{len(wrong)} of its {len(places)} samples can't be made: {wrong[0]}"
            )
        return jobs

    def _part(self, part: Part | str | None, group: int, index: int) -> Part | None:
        """What was made of it elsewhere, if that is any use; else it begins anew, and only time is lost."""
        if not isinstance(part, Part) or (part.group, part.index) != (group, index):
            return None
        return part if part.tokens.size < self._context.spec.sampling.max_tokens else None

"""Reads the assignments of one generator.

<run>.assignments ── key: is it for me? ── gate ── start, epoch ──► Work: make, give back, hand over
                             <run>.prompts, <run>.parts, by position ──┘

Assignments of other generators on the same partition are skipped by their keys alone. So are those of an
older dispatcher than the newest one heard, which has replaced it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.bus import Record
from infra.gate import Gate
from infra.roles.context import RoleContext
from infra.route_shapes import followed_shape
from producers.dispatch.jobs import RecordPlace, SampleJob
from producers.stored import Stored
from schemas.expert_routes import wrong_routes
from schemas.messages import EVERYONE, Assignment, Part, Prompt

_KEPT_BYTES = 32 << 20  # of prompts that are kept for further assignments


@dataclass(frozen=True)
class Work:
    """One assignment: jobs to make, samples to give back if not begun, and samples to hand over."""

    jobs: list[SampleJob] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    moving: list[str] = field(default_factory=list)
    tell: bool = False  # the dispatcher asks for a full report
    sent_at: float = 0.0  # by the dispatcher's clock


class Assigned:
    """Turns records into work. For use by one thread."""

    def __init__(self, context: RoleContext, start: str) -> None:
        self._context, self._start = context, start
        self._mine = {context.name, EVERYONE}
        self._gate = Gate(Assignment, context.run, context.dead_letter)
        self._epoch = 0
        self._route_shape = followed_shape(context.record.model, context.spec)
        self._fetcher = context.bus.fetcher()
        topics, deadline_s = context.topics, context.spec.deadlines.progress_s
        self._prompts = Stored(
            self._fetcher, topics.prompts, Prompt, context.run, most_bytes=_KEPT_BYTES, deadline_s=deadline_s
        )
        self._parts = Stored(
            self._fetcher, topics.parts, Part, context.run, most_bytes=0, deadline_s=deadline_s
        )

    def read(self, records: list[Record]) -> list[Work]:
        """Return the work in the records, in their order."""
        work = []
        for record, assignment in self._gate.take(record for record in records if record.name in self._mine):
            if assignment.generator != record.name or assignment.epoch < self._epoch:
                continue
            self._epoch = assignment.epoch
            if assignment.generator == EVERYONE:
                work.append(Work(tell=assignment.tell))
            elif assignment.start == self._start:
                jobs = self._jobs(record, assignment)
                work.append(
                    Work(jobs, assignment.withdrawn, assignment.moving, assignment.tell, assignment.sent_at)
                )
        return work

    def close(self) -> None:
        """Close the connection to Kafka."""
        self._fetcher.close()

    def _jobs(self, record: Record, assignment: Assignment) -> list[SampleJob]:
        """Return the assignment's valid jobs.

        If any row is invalid, the record becomes a dead letter with the first fault.
        """
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
                    f"sample {index} of group {group} does not fit the prompt of group {prompt.group}, with "
                    f"{prompt.size} samples, at {self._context.topics.prompts.name}[{place[0]}]@{place[1]}"
                )
            else:
                jobs.append(
                    SampleJob(prompt, index, self._part(parts.get(RecordPlace(0, at)), prompt, index), place)
                )
        if wrong:
            self._context.dead_letter(
                record, f"{len(wrong)} of its {len(places)} samples can't be made: {wrong[0]}"
            )
        return jobs

    def _part(self, part: Part | str | None, prompt: Prompt, index: int) -> Part | None:
        """Return the part that another generator made.

        Return None if it is of no use: the sample begins anew.
        """
        if not isinstance(part, Part) or (part.group, part.index) != (prompt.group, index):
            return None
        tokens = prompt.tokens.size + part.tokens.size - 1
        if part.routes and wrong_routes(part.routes, tokens, self._route_shape):
            return None
        return part if part.tokens.size < self._context.spec.sampling.max_tokens else None

"""Large prompts and many generators, on fakes: records stay small, and everyone gets what it can begin."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from infra.bus import read_all
from infra.memory_bus import MemoryBus
from infra.roles.context import RoleContext
from producers.assigned import Assigned
from producers.dispatch.dispatcher import ALONE
from producers.dispatch.jobs import Placed, RecordPlace, SampleJob
from schemas.messages import Assignment, GeneratorReport
from schemas.topics import ASSIGNMENT_PARTITIONS
from schemas.wire import decode, encode
from tests.dispatching import Dispatched
from tests.factories import make_context, make_spec
from tests.unit.test_backlog import prompt
from tests.waiting import wait_until

PROMPT_TOKENS = 2000
SMALL = 128 << 10  # bytes: so large is no record, far below what the bus takes


def put(context: RoleContext, groups: int, size: int) -> list[Placed]:
    """Prompts on the log, as the feeder puts them."""
    tokens = np.arange(PROMPT_TOKENS, dtype=np.int32)
    found = []
    for group in range(groups):
        one = prompt(
            group, size=size, tokens=tokens, iteration=0, min_version=0, predicted=float(100 + group % 997),
            length_class=group % 2, problem="x" * 2 * PROMPT_TOKENS,
        )  # fmt: skip
        sent = context.writer.send(
            context.topics.prompts, encode(one), key=str(group), partition=one.length_class
        )
        found.append(Placed(one, RecordPlace(one.length_class, sent.offset())))
    return found


def report(context: RoleContext, name: str, **fields: object) -> None:
    """That a generator is there, and has nothing."""
    values = {
        "run": context.run, "generator": name, "start": "1", "slots": context.spec.generator.slots,
        "batches": [1, 256], "seconds": [0.01, 0.05], "version": 0, "groups": np.zeros(0, np.int64),
        "indexes": np.zeros(0, np.int16), "tokens": np.zeros(0, np.int32), "returned": [],
        "leaving": False, "sent_at": 0.0,
    }  # fmt: skip
    message = GeneratorReport(**{**values, **fields})  # type: ignore[arg-type]
    context.writer.send(context.topics.generators, encode(message), key=name)


def assigned_to(context: RoleContext, name: str) -> Assigned:
    """What the generator of that name reads by."""
    other = make_named(context, name)
    return Assigned(other, "1")


def make_named(context: RoleContext, name: str) -> RoleContext:
    class Named(RoleContext):
        @property
        def name(self) -> str:
            return name

    return Named(**{field: getattr(context, field) for field in RoleContext.__dataclass_fields__})


def jobs_of(context: RoleContext, name: str) -> list[SampleJob]:
    """All that a generator of that name is given."""
    assigned = assigned_to(context, name)
    records = read_all(context.bus, context.topics.assignments, deadline_s=20)
    return [job for work in assigned.read(records) for job in work.jobs]


def test_600_large_prompts_for_the_only_generator(tmp_path: Path) -> None:
    spec = make_spec(
        generator={"slots": 64}, algorithm={"groups": 600, "group_size": 8},
        sampling={"max_prompt_tokens": PROMPT_TOKENS, "max_tokens": 4096},
        trainer={"microbatch_tokens": 8192},
    )  # fmt: skip
    context = make_context(spec, tmp_path)
    known = put(context, 600, 8)
    dispatched = Dispatched(context, known)
    try:
        report(context, "g")
        wait_until(lambda: context.heart.counters.get("dispatched"), what="work", deadline_s=30)
        dispatched.service.check()
        counters = context.heart.counters
        assert counters["dispatched"] == 64 + ALONE, "work is given ahead, and not all there is"
        assert counters["undispatched"] == 600 * 8 - 64 - ALONE
        jobs = jobs_of(context, "g")
        assert len({job.key for job in jobs}) == len(jobs) == 64 + ALONE
        assert all(job.prompt.tokens.size == PROMPT_TOKENS for job in jobs)
    finally:
        dispatched.close()


def test_256_generators_of_256_slots_with_large_prompts(tmp_path: Path) -> None:
    count, slots, size = 256, 256, 64
    spec = make_spec(
        generator={"slots": slots}, algorithm={"groups": 1100, "group_size": size},
        sampling={"max_prompt_tokens": PROMPT_TOKENS, "max_tokens": 4096},
        trainer={"microbatch_tokens": 8192}, dispatch={"silence_s": 120.0},
    )  # fmt: skip
    context = make_context(spec, tmp_path)
    names = [f"generator-{number}@host" for number in range(count)]
    dispatched = Dispatched(context)
    try:
        for name in names:
            report(context, name)
        wait_until(
            lambda: context.heart.counters.get("generators") == count, what="all of them", deadline_s=60
        )
        dispatched.admit(put(context, 1100, size))
        wait_until(
            lambda: dispatched.service.check() or context.heart.counters["dispatched"] >= count * slots,
            what="work for every slot", deadline_s=120,
        )  # fmt: skip
        dispatched.service.check()
    finally:
        dispatched.close()
    bus = context.bus
    assert isinstance(bus, MemoryBus)
    records = [record for log in bus.log(context.topics.assignments) for record in log]
    assert max(len(record.value) for record in records) < SMALL
    told = [decode(record.value, Assignment) for record in records]
    rows = [
        (group, index)
        for one in told
        for group, index in zip(one.groups.tolist(), one.indexes.tolist(), strict=True)
    ]
    assert len(rows) == len(set(rows)) == count * slots
    per_generator = dict.fromkeys(names, 0)
    for one in told:
        if not one.tell:
            per_generator[one.generator] += one.groups.size
    assert set(per_generator.values()) == {slots}
    for name in names[:3]:
        assert len({job.key for job in jobs_of(context, name)}) == slots
    assert len(records) < 8 * count + ASSIGNMENT_PARTITIONS, "one record says much"

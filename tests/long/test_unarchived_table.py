"""Records that are not archived yet give the same answers, and only the needed columns are made of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from flows.run.archive_query import answered
from infra.archive import unarchived_table
from infra.archive.archive_writing import ArchiveWriter
from infra.archive.columns import to_table
from infra.bus import BusError, Record
from infra.roles.context import RoleContext
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec

QUERIES = (
    "select count(*) from samples",
    'select iteration, count(*), sum("group"), max(len(tokens)) from samples group by 1 order by 1',
    "select * from samples order by log_partition, log_offset",
    "from samples order by log_partition, log_offset",
    "select samples from samples order by log_partition, log_offset",
    "select reward_parts, list_sum(logprobs) from samples where seed > 1 and reward_error = '' order by 2",
)


def ask(context: RoleContext, sql: str, bus: Any = None) -> list[tuple[Any, ...]]:
    with answered(bus or context.bus, context.store, context.record, sql) as answer:
        return [row for rows in answer.rows for row in rows]


def archive(context: RoleContext) -> None:
    ArchiveWriter(context.bus, context.store, context.topics, context.run, "", deadline_s=5).archive(now=1.0)


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """A sample; or a lie: damaged, of another run, with numbers that no column holds, in contradiction."""
    sample = make_sample(make_spec(), draw(st.integers(0, 9)), draw(st.integers(0, 1)))
    how = draw(st.integers(0, 6))
    if how == 1:
        return draw(st.binary(max_size=30))
    if how == 2:
        raw = bytearray(encode(sample))
        raw[draw(st.integers(0, len(raw) - 1))] ^= 1 << draw(st.integers(0, 7))
        return bytes(raw)
    lies: dict[int, dict[str, Any]] = {
        3: {"run": "another-1"}, 4: {"attempt": 2**63}, 5: {"seed": 2**64 - 1},
        6: {"logprobs": np.full(sample.logprobs.size, draw(st.sampled_from([0.0, -0.0, 0.5, math.nan])),
                                np.float32)},
    }  # fmt: skip
    return encode(structs.replace(sample, **lies.get(how, {})))


@given(values=st.lists(records(), max_size=12), archived=st.integers(0, 12), batch=st.integers(1, 5))
@settings(deadline=None, max_examples=12)
def test_the_answer_does_not_depend_on_how_much_is_archived(
    values: list[bytes], archived: int, batch: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(unarchived_table, "_BATCH", batch)
        context = make_context(make_spec(), Path(folder))
        for number, value in enumerate(values):
            context.writer.send(context.topics.samples, value, key="x", partition=number % 2)
            if number + 1 == archived:
                archive(context)
        before = [repr(ask(context, sql)) for sql in QUERIES]
        archive(context)
        assert [repr(ask(context, sql)) for sql in QUERIES] == before


def test_only_the_columns_that_a_query_needs_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[set[str]] = []

    def spy(records: Sequence[Record], kind: Any, names: Collection[str]) -> Any:
        made.append(set(names))
        return to_table(records, kind, names)

    monkeypatch.setattr(unarchived_table, "to_table", spy)
    context = make_context(make_spec(), tmp_path)
    sample = make_sample(context.spec, 1, 0)
    context.writer.send(context.topics.samples, encode(sample), key=sample.id, partition=1)
    assert ask(context, "select max(reward) from samples where iteration < 10") == [(sample.reward,)]
    assert made == [{"reward", "iteration", "run", "log_fault"}]


def test_an_error_of_the_broker_is_said_as_it_is(tmp_path: Path) -> None:
    context = make_context(make_spec(), tmp_path)

    class Broken:
        def topic_names(self) -> set[str]:
            return context.bus.topic_names()

        def reader(self, *_: Any) -> NoReturn:
            raise BusError("the broker went away")

    with pytest.raises(BusError, match="went away"):
        ask(context, "select count(*) from samples", Broken())

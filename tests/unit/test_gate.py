"""The gate: a record becomes a message or is refused with a reason, and nothing is raised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.bus import Record
from infra.gate import Gate
from infra.kafka_bus import LARGEST_RECORD
from schemas.messages import DeadLetter, Sample
from schemas.wire import decode, encode
from tests.factories import make_context, make_sample, make_spec

SPEC = make_spec()


def record(value: bytes, key: bytes = b"k") -> Record:
    return Record("test-1.samples", 0, 7, key, value)


def test_what_passes_and_what_is_refused() -> None:
    refused: list[str] = []
    gate = Gate(
        Sample, "test-1", lambda record, reason: refused.append(reason),
        unfit=lambda sample: "it is too short" if sample.true_length < 3 else "",
    )  # fmt: skip
    good = make_sample(SPEC, 0, 0)
    values = [
        encode(good), b"rubbish", encode(make_sample(SPEC, 0, 1, run="other")),
        encode(make_sample(SPEC, 0, 1, length=1)),
        encode(make_sample(SPEC, 0, 1, logprobs=np.zeros(1, np.float32))),
    ]  # fmt: skip
    assert [sample.id for _, sample in gate.take(map(record, values))] == [good.id]
    assert "too few" in refused[0] and "of run other" in refused[1] and "too short" in refused[2]
    assert "logprobs" in refused[3] and len(refused) == 4


def test_a_check_that_raises_refuses() -> None:
    refused: list[str] = []
    gate = Gate(
        Sample, "test-1", lambda record, reason: refused.append(reason), unfit=lambda sample: {}[sample.group]
    )
    assert gate.take_one(record(encode(make_sample(SPEC, 0, 0)))) is None
    assert "can't be understood: KeyError" in refused[0]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 400), st.booleans())
def test_nothing_that_a_record_holds_is_raised(garbage: bytes, at: int, whole: bool) -> None:
    value = garbage
    if not whole:
        good = bytearray(encode(make_sample(SPEC, 0, 0)))
        good[at : at + len(garbage)] = garbage
        value = bytes(good)
    refused: list[str] = []
    found = Gate(Sample, "test-1", lambda record, reason: refused.append(reason)).take_one(record(value))
    assert (found is None) == bool(refused) and all(refused)


def test_a_letter_of_the_largest_record_fits(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    context.dead_letter(record(b"x" * (LARGEST_RECORD - 100)), "y" * 100_000)
    (letter,) = context.bus.log(context.topics.dead)[0]
    assert len(letter.value) < 1 << 20
    found = decode(letter.value, DeadLetter)
    assert (found.topic, found.partition, found.offset) == ("test-1.samples", 0, 7)
    assert found.reason.startswith("yyy") and found.raw == b""


def test_a_key_that_is_no_text_has_a_name() -> None:
    assert record(b"", b"\xff\xfe1").name.endswith("1")

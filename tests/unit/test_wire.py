"""The codec: what goes in comes out, arrays are views, and what can't be read is refused with a reason."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta, structs

from schemas import messages
from schemas.messages import Prompt, Sample
from schemas.wire import Message, RawArray, Unreadable, decode, encode
from tests.factories import make_sample, make_spec
from tests.fakes.fill import fill

KINDS = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.KIND
]
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=True, width=64),
    bool: st.booleans(),
    bytes: st.binary(max_size=64),
    list[str]: st.lists(st.text(max_size=5), max_size=4),
    list[int]: st.lists(st.integers(0, 2**40), max_size=4),
    list[bytes]: st.lists(st.binary(max_size=20), max_size=4),
    list[list[int]]: st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=3),
    list[float]: st.lists(st.floats(allow_nan=False), max_size=4),
    dict[str, float]: st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=4),
}


def arrays(dtype: str) -> st.SearchStrategy[np.ndarray]:
    """Any bits of a dtype: NaN payloads too."""
    size = np.dtype(dtype).itemsize
    return st.binary(max_size=size * 40).map(
        lambda raw: np.frombuffer(raw[: len(raw) // size * size], dtype=dtype)
    )


def scalar(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field may have by itself."""
    base, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    bounds = marks[0] if marks else Meta()
    if base is int and marks:
        return st.integers(bounds.ge, bounds.le)
    if base is str:
        return st.text(min_size=bounds.min_length or 0, max_size=20)
    if get_origin(base) is tuple:
        return st.lists(scalar(get_args(base)[0]), max_size=4).map(tuple)
    return SCALARS[base]


def any_message(kind: type[Message]) -> st.SearchStrategy[Message]:
    fields = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is ClassVar:
            continue
        marks = [mark for mark in get_args(hint) if isinstance(mark, RawArray)] if get_origin(hint) else []
        fields[name] = arrays(marks[0].dtype) if marks else scalar(hint)
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.KIND)
def test_round_trip(kind: type[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(max_examples=40, deadline=None)
    @given(any_message(kind))
    def check(message: Message) -> None:
        if message.wrong():
            with pytest.raises(Unreadable, match=re.escape(message.wrong())):
                decode(encode(message), kind)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "wrong", lambda self: "")
            assert decode(encode(message), kind) == message

    check()


def bounded_fields() -> list[tuple[type[Message], str, Meta]]:
    return [
        (kind, name, get_args(hint)[1])
        for kind in KINDS
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if get_origin(hint) is Annotated and get_args(hint)[0] is int
    ]


@pytest.mark.parametrize(("kind", "name", "bounds"), bounded_fields(), ids=lambda value: str(value)[:40])
def test_a_number_out_of_range_is_refused(kind: type[Message], name: str, bounds: Meta) -> None:
    message = fill(kind)
    for value in (bounds.ge - 1, bounds.le + 1):
        with pytest.raises(Unreadable, match=name):
            decode(encode(structs.replace(message, **{name: value})), kind)


def test_depth_and_numbers_of_arrays_are_bounded() -> None:
    head = msgspec.msgpack.encode({"kind": "sample", "version": 1, "arrays": []})[1:]
    deep = b"\x84" + head + msgspec.msgpack.encode("fields") + b"\x91" * 200_000 + b"\xc0"
    many = msgspec.msgpack.encode(
        {"kind": "sample", "version": 1, "fields": {}, "arrays": [("x", "int8", 0, 0)] * 100_000}
    )
    for header in (deep, many):
        gap = -(16 + len(header)) % 8
        raw = struct.pack("<4sHHII", b"SRL\0", 1, 0, len(header), 0) + header + b"\0" * gap
        with pytest.raises(Unreadable, match="header can't be read"):
            decode(raw, messages.Sample)


def test_arrays_are_views_into_the_record() -> None:
    sample = make_sample(make_spec(), 0, 0, length=2500)
    raw = encode(sample)
    assert 18_000 < len(raw) < 22_000
    read = decode(raw, messages.Sample)
    whole = np.frombuffer(raw, dtype=np.uint8)
    for array in (read.tokens, read.logprobs, read.prompt_tokens):
        assert np.shares_memory(array, whole)
        assert not array.flags.writeable


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    raw = bytearray(encode(make_sample(make_spec(), 3, 1)))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
        with pytest.raises(Unreadable):
            decode(bytes(raw), messages.Sample)
        return
    place, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
    raw[place] ^= 1 << bit
    try:
        decode(bytes(raw), messages.Sample)  # a flipped value may still be a message: never another error
    except Unreadable as error:
        assert str(error)


def test_reasons_say_what_is_wrong() -> None:
    sample = make_sample(make_spec(), 0, 0)
    with pytest.raises(Unreadable, match="not a StreamRL record"):
        decode(b"{'pickle': 'no'}" * 4, messages.Sample)
    with pytest.raises(Unreadable, match="'sample' record where a 'prompt' is expected"):
        decode(encode(sample), messages.Prompt)
    newer = type("Newer", (messages.Sample,), {"VERSION": 2}, frozen=True, kw_only=True)
    fields = {name: getattr(sample, name) for name in sample.__struct_fields__}
    with pytest.raises(Unreadable, match=r"schema 2 is newer than 1.*upgrade the reader"):
        decode(encode(newer(**fields)), messages.Sample)


def test_nan_survives() -> None:
    sample = make_sample(make_spec(), 0, 0, reward=math.nan, reward_error="it raised")
    assert math.isnan(decode(encode(sample), messages.Sample).reward)


@pytest.mark.parametrize(("name", "kind"), [("prompt", Prompt), ("sample", Sample)])
def test_records_from_before_a_field_had_its_name_are_read_and_written_alike(
    name: str, kind: type[Prompt] | type[Sample]
) -> None:
    old = bytes.fromhex(
        json.loads((Path(__file__).parents[1] / "recorded" / "messages.json").read_text())[name]
    )
    message = decode(old, kind)
    assert message.iteration in (0, 1) and message.group == {"prompt": 3, "sample": 1}[name]
    assert b"window" in encode(message) and b"iteration" not in encode(message)
    assert decode(encode(message), kind) == message and len(encode(message)) == len(old)


@given(
    st.lists(
        st.one_of(
            st.floats(width=32),
            st.sampled_from([0.0, -0.0, 1e-3, 2e-3, -math.inf, math.inf, math.nan, -3.4028234663852886e38]),
        ),
        max_size=9,
    )
)
def test_logprobs_that_no_model_gives_are_refused(values: list[float]) -> None:
    said = np.array(values, np.float32)
    sample = structs.replace(
        make_sample(make_spec(), 0, 0), tokens=np.zeros(said.size, np.int32), logprobs=said
    )
    fine = all(math.isfinite(one) and one <= np.float32(1e-3) for one in said)
    assert ("logprobs" in sample.wrong()) == (not fine)

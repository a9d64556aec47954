"""Packed records: what goes in comes out, old ones are read, and a hostile one takes no more room."""

from __future__ import annotations

import json
import re
import struct
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from flows.run.run_difference import _difference
from infra.archive.columns import RAW, to_records, to_table
from infra.bus import LARGEST_RECORD, Record
from infra.gate import Gate
from schemas import packed, wire
from schemas.identity import digest_of_seeds
from schemas.messages import Sample, StepRecord
from schemas.packed import LARGEST_PLAIN, hash_of_dictionary, is_packed, unpacked_record
from schemas.wire import MAGIC, Contradictory, Unreadable, decode, encode
from tests.factories import make_sample, make_spec
from tests.fakes.fill import fill
from tests.step_dictionary import step_dictionary

ROOT = Path(__file__).parents[2]
OLD = bytes.fromhex(json.loads((ROOT / "tests" / "recorded" / "messages.json").read_text())["step"])
NAME = StepRecord.DICTIONARY


def step(rows: int = 64, run: str = "r-1") -> StepRecord:
    draw = np.random.default_rng(rows)
    order = draw.permutation(rows)
    floats = {
        name: draw.normal(size=rows).astype(np.float32)[order // 8]  # equal within a group
        for name in ("rewards", "predicted", "advantages", "scores", "logprobs", "gaps")
    }
    return fill(
        StepRecord, run=run, groups=order // 8, indexes=order % 8, partitions=order % 3,
        offsets=order + 2**40, lengths=draw.integers(1, 4000, rows), versions=np.full(rows, 7),
        microbatches=np.array([rows]),
        problem_ids=[f"train-{n // 8}" for n in order], metrics={"reward": 0.1, "loss": np.pi}, **floats,
    )  # fmt: skip


def plain(message: StepRecord) -> bytes:
    return encode(message, packs=False)


def frame(content: bytes, *, dictionary: str = NAME, says_size: bool = True) -> bytes:
    """A packed record of any content."""
    words = zstandard.ZstdCompressionDict(packed._content(NAME), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    compressor = zstandard.ZstdCompressor(dict_data=words, write_content_size=says_size)
    return struct.pack("<4sHHI", MAGIC, 2, 0, int(dictionary, 16)) + compressor.compress(content)


def test_a_step_comes_back_to_the_bit_and_is_much_smaller() -> None:
    message = step()
    raw = encode(message)
    assert is_packed(raw, MAGIC) and len(raw) < len(plain(message)) / 2
    read = decode(raw, StepRecord)
    assert read == structs.replace(
        message,
        **{
            name: np.asarray(getattr(message, name)).astype(getattr(read, name).dtype)
            for name in read.__struct_fields__
            if isinstance(getattr(read, name), np.ndarray)
        },
    )
    assert encode(read) == raw == encode(decode(memoryview(bytearray(raw)), StepRecord))
    assert not any(getattr(read, name).flags.writeable for name in ("groups", "offsets", "logprobs"))
    assert decode(plain(message), StepRecord) == read


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30), st.sampled_from(["int16", "int32", "int64"]))
def test_differences_give_back_any_numbers(numbers: list[int], dtype: str) -> None:
    values = np.array(numbers, np.int64).astype(dtype)
    found, narrow = wire._differences(values)
    assert np.add.accumulate(found, dtype=values.dtype).tolist() == values.tolist()
    assert narrow == "+int64" or found.dtype.itemsize <= values.dtype.itemsize * 2


@given(st.binary(max_size=2000))
def test_any_record_comes_back(content: bytes) -> None:
    raw = packed.packed_record(MAGIC + content, NAME)
    assert unpacked_record(raw) == MAGIC + content


def test_steps_of_schema_1_are_read() -> None:
    old = decode(OLD, StepRecord)
    assert b"\0version" not in OLD and old.step == 15 and old.indexes.tolist() == [4, 7, 3]
    assert (old.groups == 503).all() and old.offsets.tolist() == [1193, 1077, 1104]
    assert old.problem_ids == ["train-01110"] * 3 and old.lengths.tolist() == [40, 40, 43]
    assert old.seeds[0] == 3105221169572581941 and old.seeds_digest == ""
    assert decode(encode(old), StepRecord) == old and len(encode(old)) < len(OLD) / 2
    new = structs.replace(
        old, seeds=np.zeros(0, np.uint64), seeds_digest=digest_of_seeds(reversed(old.seeds.tolist()))
    )
    assert _difference(old, new)["same_samples"] and _difference(new, old)["same_samples"]
    other = structs.replace(old, seeds=old.seeds + np.uint64(1))
    assert not _difference(new, other)["same_samples"]
    with pytest.raises(Contradictory, match="its seeds are of 2 samples; it names 3"):
        decode(encode(structs.replace(old, seeds=old.seeds[:2])), StepRecord)


def test_an_archive_keeps_steps_of_schema_1_and_gives_back_files_from_before_a_field() -> None:
    records = [Record("t", 0, 0, b"15", OLD), Record("t", 0, 1, b"0", encode(step()))]
    table = to_table(records, StepRecord)
    assert [one is None for one in table[RAW].to_pylist()] == [False, True]
    unpacked = replace(records[1], value=plain(step()))  # its reader would unpack it at once
    assert list(to_records(table, "t", StepRecord)) == [records[0], unpacked]
    before = to_table(records[1:], StepRecord).drop_columns(["seeds_digest", "sketches"])
    assert list(to_records(before, "t", StepRecord)) == [unpacked]


_OF_STEP = wire._laid_out(step(16), differences=True)


@given(st.lists(st.tuples(st.integers(0, len(_OF_STEP) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_damage_inside_a_packed_record_is_refused_or_harmless(changes: list[tuple[int, int]]) -> None:
    content = bytearray(_OF_STEP)
    for place, value in changes:
        content[place] = value
    try:
        decode(frame(bytes(content)), StepRecord)
    except Unreadable as error:
        assert str(error)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_what_is_no_frame_is_refused(rubbish: bytes) -> None:
    with pytest.raises(Unreadable):
        decode(encode(step())[:12] + rubbish, StepRecord)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (frame(bytes(1 << 20)), r"its \d+ bytes would become 1048576; at most \d+ are expected"),
        (frame(np.random.default_rng(0).bytes(LARGEST_PLAIN + 1)), f"would become {LARGEST_PLAIN + 1}"),
        (frame(_OF_STEP, says_size=False), "does not say how large it becomes"),
        (frame(_OF_STEP) + b"x", "unused data"),
        (frame(_OF_STEP) * 2, "unused data"),
        (frame(_OF_STEP)[:-3], "did not decompress full frame|corruption|wrong"),
        (frame(_OF_STEP, dictionary="00c0ffee"), "dictionary 00c0ffee, .* does not have: upgrade the reader"),
        (frame(frame(_OF_STEP)), "envelope format 2 is unknown"),
        (frame(b""), "0 bytes are too few"),
        (frame(_OF_STEP)[:11], "11 bytes are too few|truncated"),
    ],
)  # fmt: skip
def test_a_hostile_record_is_refused_before_it_takes_room(raw: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        decode(raw, StepRecord)
    said: list[str] = []
    gate = Gate(StepRecord, "r-1", lambda record, why: said.append(why))
    assert gate.take_one(Record("t", 0, 0, b"", raw)) is None and re.search(reason, said[0])


def test_a_record_that_becomes_too_large_is_not_packed() -> None:
    assert LARGEST_PLAIN == LARGEST_RECORD
    flat = fill(StepRecord, run="r-1", metrics={}, root_out="x" * 2_000_000)
    assert not is_packed(encode(flat), MAGIC)
    assert decode(encode(flat), StepRecord) == decode(plain(flat), StepRecord)


def test_only_kinds_that_are_packed_are_unpacked() -> None:
    """A reader of samples holds many: each may take no more room than its record."""
    assert not Sample.DICTIONARY
    with pytest.raises(Unreadable, match="envelope format 2 is unknown"):
        decode(frame(encode(make_sample(make_spec(), 0, 0))), Sample)


def test_sums_of_differences_are_bounded() -> None:
    """Many fields may be said to stand at the same place: each sum takes room of its own."""
    count = 4 << 20
    head = msgspec.msgpack.encode(
        {"kind": "step", "version": 2, "fields": {}, "arrays": [("groups", "+int8", count, 0)] * 9}
    )
    raw = struct.pack("<4sHHII", MAGIC, 1, 0, len(head), count) + head + bytes(-(16 + len(head)) % 8)
    with pytest.raises(Unreadable, match="become more than 33554432 bytes"):
        decode(raw + bytes(count), StepRecord)
    for dtype in ("+float32", "+", "++int8", "+uint64"):
        few = msgspec.msgpack.encode(
            {"kind": "step", "version": 2, "fields": {}, "arrays": [("groups", dtype, 1, 0)]}
        )
        raw = struct.pack("<4sHHII", MAGIC, 1, 0, len(few), 8) + few + bytes(-(16 + len(few)) % 8) + bytes(8)
        with pytest.raises(Unreadable, match=re.escape(f"groups has type {dtype}; int64 is expected")):
            decode(raw, StepRecord)


def test_a_dictionary_is_what_its_name_says(tmp_path: Path) -> None:
    folder = ROOT / "schemas" / "dictionaries"
    assert f"{NAME}.bin" in [file.name for file in folder.iterdir()]
    for file in folder.glob("*.bin"):
        assert hash_of_dictionary(file.read_bytes()) == file.stem, "an old record needs this file as it was"
    (tmp_path / "00000001.bin").write_bytes(b"other words")
    with (
        patch.object(packed, "_FOLDER", tmp_path),
        pytest.raises(Unreadable, match=r"00000001\.bin is damaged: install"),
    ):
        decode(frame(_OF_STEP, dictionary="00000001"), StepRecord)
    assert step_dictionary() == step_dictionary()


def test_threads_pack_beside_each_other() -> None:
    raws = [encode(step(rows)) for rows in range(1, 9)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            message = decode(raws[number], StepRecord)
            if encode(message) != raws[number] or message.groups.size != number + 1:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

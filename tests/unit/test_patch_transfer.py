"""A patch goes to another machine as it is, or not at all."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.ranks.frames import read_frame, write_frame
from infra.weights.patch import PatchFile, read_patch
from producers.engines.far_messages import PatchFollows, ToMachine
from producers.engines.patch_transfer import BadPatch, ReceivedPatch, largest_patch, send_patch
from tests.factories import make_tiny_model

MOST = 1 << 22


def sent(file: Path) -> tuple[int, bytes]:
    """The size that the frame says, and what follows it."""
    wire = io.BytesIO()
    size = send_patch(file, lambda head: write_frame(wire, head), lambda data: wire.write(data) and None)
    wire.seek(0)
    said = msgspec.msgpack.decode(read_frame(wire) or b"", type=ToMachine)
    assert said == PatchFollows(size)
    return size, wire.read()


@given(st.binary(max_size=3000), st.integers(0, 700))
@settings(max_examples=30, deadline=None)
def test_a_file_arrives_as_it_was_sent(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, times: int
) -> None:
    file = tmp_path_factory.mktemp("patch") / "file"
    file.write_bytes(data * times)
    size, wire = sent(file)
    found = ReceivedPatch()
    rest = io.BytesIO(wire + b"next")
    found.receive(size, rest, MOST)
    assert found.path.read_bytes() == data * times
    assert rest.read() == b"next"
    found.close()


@pytest.mark.parametrize(
    ("spoiled", "error"),
    [
        (lambda wire: wire[:-33], "ended 1 bytes before the end"),
        (lambda wire: wire[:-1], "another digest"),
        (lambda wire: bytes([wire[0] ^ 1]) + wire[1:], "another digest"),
        (lambda wire: b"", "ended 5000 bytes before the end"),
    ],
)
def test_a_patch_that_changed_on_the_way_is_refused(
    tmp_path: Path, spoiled: Callable[[bytes], bytes], error: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(250)) * 20)
    size, wire = sent(file)
    with pytest.raises(BadPatch, match=error):
        ReceivedPatch().receive(size, io.BytesIO(spoiled(wire)), MOST)


def test_a_patch_may_not_be_larger_than_its_model_allows(tmp_path: Path) -> None:
    most = largest_patch(str(make_tiny_model(tmp_path / "model")))
    with pytest.raises(BadPatch, match=rf"has {most + 1} bytes, and the model allows {most}"):
        ReceivedPatch().receive(most + 1, io.BytesIO(), most)


def test_a_real_patch_is_read_where_it_arrived() -> None:
    made = PatchFile({}, {}, since="a", root="b")
    size, wire = sent(made.path)
    found = ReceivedPatch()
    found.receive(size, io.BytesIO(wire), MOST)
    assert (read_patch(found.path).since, read_patch(found.path).root) == ("a", "b")

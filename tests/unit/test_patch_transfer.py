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
from producers.engines.patch_transfer import largest_patch, receive_patch, send_patch
from producers.engines.received_patch import PatchRefused, ReceivedPatch
from producers.engines.server_facts import DIGEST_BYTES
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


def received(size: int, source: io.BytesIO, most: int = MOST) -> bytes:
    """The bytes of a patch that has arrived."""
    with ReceivedPatch(size + DIGEST_BYTES, most) as patch:
        return Path(receive_patch(patch, size, source)).read_bytes()


@given(st.binary(min_size=1, max_size=3000), st.integers(1, 700))
@settings(max_examples=30, deadline=None)
def test_a_file_arrives_as_it_was_sent(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, times: int
) -> None:
    file = tmp_path_factory.mktemp("patch") / "file"
    file.write_bytes(data * times)
    size, wire = sent(file)
    rest = io.BytesIO(wire + b"next")
    assert received(size, rest) == data * times
    assert rest.read() == b"next"


@pytest.mark.parametrize(
    ("spoiled", "error"),
    [
        (lambda wire: wire[:-33], "1 bytes of it are missing"),
        (lambda wire: wire[:-1], "broke off"),
        (lambda wire: bytes([wire[0] ^ 1]) + wire[1:], "another hash"),
        (lambda wire: b"", "5000 bytes of it are missing"),
    ],
)
def test_a_patch_that_changed_on_the_way_is_refused(
    tmp_path: Path, spoiled: Callable[[bytes], bytes], error: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(250)) * 20)
    size, wire = sent(file)
    with pytest.raises(PatchRefused, match=error):
        received(size, io.BytesIO(spoiled(wire)))


def test_a_patch_may_not_be_larger_than_its_model_allows(tmp_path: Path) -> None:
    most = largest_patch(str(make_tiny_model(tmp_path / "model")))
    with pytest.raises(PatchRefused, match=f"a patch of {most + 1} bytes: the model allows from 1 to {most}"):
        received(most + 1, io.BytesIO(), most)


def test_a_real_patch_is_read_where_it_arrived() -> None:
    made = PatchFile({}, {}, since="a", root="b")
    size, wire = sent(made.path)
    with ReceivedPatch(size + DIGEST_BYTES, MOST) as patch:
        found = read_patch(Path(receive_patch(patch, size, io.BytesIO(wire))))
        assert (found.since, found.root) == ("a", "b")

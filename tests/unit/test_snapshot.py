"""A state that is read while its owner goes on: what is read is what was, whenever it changes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from consumers.learners import memory_rooms as rooms
from consumers.learners import snapshot
from consumers.learners.snapshot import Abandoned, StateSnapshot
from infra.choices import ROOM
from infra.waiting import WaitedTooLong
from tests.waiting import wait_until

KEPT = (rooms.MEMORY, rooms.DISK)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 bytes, so that small tensors have several."""
    monkeypatch.setattr(snapshot, "PIECE", 64)


def tensors() -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    return {
        "wide": torch.randn(7, 33, generator=noise), "half": torch.randn(50, generator=noise).bfloat16(),
        "step": torch.tensor(3.0), "none": torch.zeros(0, 4), "rng": torch.arange(100, dtype=torch.uint8),
        "turned": torch.randn(5, 9, generator=noise).t(), "count": torch.tensor(2**40),
    }  # fmt: skip


def copied(some: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in some.items()}


def bytes_of(taken: StateSnapshot) -> Iterator[bytes]:
    """Whoever reads keeps what it was given: the next piece is written over it."""
    yield taken.head
    for _, piece in taken.pieces():
        yield bytes(piece)


def same(file: bytes, expected: dict[str, torch.Tensor]) -> bool:
    found = load(file)
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in expected.items()
    )


def test_it_is_a_safetensors_file() -> None:
    taken = StateSnapshot(tensors())
    file = b"".join(bytes_of(taken))
    assert len(file) == len(taken.head) + taken.size
    assert same(file, tensors())


def test_what_lies_on_a_gpu_is_read_beside_the_queue_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece on a stream of its own, once all that wrote to the tensors is done."""
    calls = list[str]()

    @contextmanager
    def own_stream(device: torch.device) -> Iterator[None]:
        calls.append("begin")
        yield
        calls.append("end")

    def downloaded(part: torch.Tensor) -> list[np.ndarray]:
        calls.append("copy")
        return [np.full(part.numel(), 7, np.uint8)]

    monkeypatch.setattr(snapshot, "settled", lambda device: calls.append(f"settled on {device}"))
    monkeypatch.setattr(snapshot, "own_stream", own_stream)
    monkeypatch.setattr(snapshot, "downloaded", downloaded)
    taken = StateSnapshot({name: torch.zeros(16, device="meta") for name in "ab"})
    assert calls == ["settled on meta"]
    assert set(b"".join(bytes_of(taken))[len(taken.head) :]) == {7}
    assert calls[1:] == ["begin", "copy", "end"] * 2


@pytest.mark.parametrize("where", KEPT)
@given(read=st.integers(0, 40), data=st.data())
@settings(deadline=None, max_examples=25)
def test_what_changes_is_copied_before(where: str, read: int, data: st.DataObject) -> None:
    live, own = tensors(), {"own": torch.arange(40.0)}
    expected = copied(live | own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROOM.variable, where)
        patch.setattr(snapshot, "PIECE", data.draw(st.sampled_from([16, 64, 1 << 20])))
        taken = StateSnapshot(live, own)
        pieces = bytes_of(taken)
        head = [piece for _, piece in zip(range(read), pieces, strict=False)]
        taken.settle()
        for tensor in live.values():
            tensor.zero_()
        taken.settle()
        assert same(b"".join([*head, *pieces]), expected)


def test_what_was_read_to_its_end_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "where", lambda size: pytest.fail(f"{size} bytes were to be copied"))
    taken = StateSnapshot(tensors())
    list(bytes_of(taken))
    taken.settle()
    StateSnapshot({}, tensors()).settle()


def test_only_the_rest_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(rooms, "where", lambda size: asked.append(size) or rooms.MEMORY)
    live = {name: torch.zeros(64) for name in "abcd"}
    taken = StateSnapshot(live)
    pieces = bytes_of(taken)
    for _ in range(1 + 2 * 4 + 1):  # the head, a, b, and the first of c
        next(pieces)
    taken.settle()
    assert asked == [2 * 256]


def settled_in_a_thread(taken: StateSnapshot) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def settle() -> None:
        try:
            taken.settle()
        except WaitedTooLong as error:
            errors.append(error)

    thread = threading.Thread(target=settle, daemon=True)
    thread.start()
    return thread, errors


def test_without_room_the_step_waits_for_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOM.variable, "none")
    live = tensors()
    expected, taken = copied(live), StateSnapshot(live, deadline_s=60)
    pieces = bytes_of(taken)
    head = [next(pieces) for _ in range(5)]
    thread, errors = settled_in_a_thread(taken)
    assert thread.is_alive()
    file = b"".join([*head, *pieces])
    thread.join(30)
    assert not thread.is_alive() and not errors
    assert same(file, expected)


def test_a_wait_without_progress_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOM.variable, "none")
    monkeypatch.setattr(snapshot, "_LOOK_S", 0.01)
    with pytest.raises(
        WaitedTooLong, match=r"a checkpoint to be written \(neither memory nor TMPDIR has room"
    ):
        StateSnapshot(tensors(), deadline_s=0.05).settle()


def test_one_that_is_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOM.variable, "none")
    taken = StateSnapshot(tensors(), deadline_s=60)
    pieces = bytes_of(taken)
    for _ in range(3):
        next(pieces)
    thread, errors = settled_in_a_thread(taken)
    taken.abandon()
    wait_until(lambda: not thread.is_alive(), what="the step goes on")
    assert not errors
    with pytest.raises(Abandoned):
        list(pieces)


@pytest.mark.parametrize(
    ("memory", "disk", "where"), [(10, 10, "memory"), (2, 10, "disk"), (2, 2, "none"), (10, 0, "memory")]
)
def test_memory_comes_first_then_the_disk(
    memory: int, disk: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ROOM.variable, raising=False)
    monkeypatch.setattr(rooms, "_SPARE", 1)
    monkeypatch.setattr(rooms, "free_memory", lambda: memory)
    monkeypatch.setattr(rooms.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": disk}))
    assert rooms.where(5) == where


def test_a_file_that_has_no_room_after_all_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv(ROOM.variable, "disk")
    monkeypatch.setattr(snapshot.os, "posix_fallocate", full)
    assert snapshot._room(100) is None


def test_memory_that_nobody_holds_is_used_again() -> None:
    known = rooms.Rooms(2)
    first = known.take(1 << 16)
    first[:] = 7
    view = torch.from_numpy(first)[16:32].view(2, 8)
    place = first.ctypes.data
    del first
    second = known.take(1 << 16)
    assert second.ctypes.data != place, "a view is held"
    assert view.eq(7).all()
    del view
    assert known.take(1 << 16).ctypes.data == place


class Locking:
    """CUDA's calls that lock memory and let it go."""

    def __init__(self, answer: int = 0) -> None:
        self.locked, self._answer = dict[int, int](), answer

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        if not self._answer:
            self.locked[place] = size
        return self._answer

    def cudaHostUnregister(self, place: int) -> int:
        ctypes.string_at(place, self.locked.pop(place))  # it is still there
        return 0


@pytest.mark.parametrize("kept", [0, 2])
def test_locked_memory_is_unlocked_before_it_is_given_back(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Locking()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    pool = rooms.Rooms(kept, locked=True)
    some = [torch.from_numpy(pool.take(1 << 16)) for _ in range(3)]
    assert list(cuda.locked.values()) == [1 << 16] * 3
    del some[1:]
    assert len(cuda.locked) == 1 + kept
    del pool
    assert some[0].data_ptr() in cuda.locked
    del some
    assert not cuda.locked


def test_memory_that_can_not_be_locked_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [712]

    def kernel(*_: object, **__: object) -> None:
        if left:
            raise RuntimeError(f"CUDA error {left.pop()}")

    cuda = Locking(answer=left[0])
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(rooms.torch, "zeros", kernel)
    pool = rooms.Rooms(0, locked=True)
    pool.take(1 << 16)[:] = 3
    assert not left, "the next kernel would raise it"

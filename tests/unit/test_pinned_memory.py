"""Weights on their way to and from a GPU, with memory that is not pinned: the pieces, and the hashes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.weights.digest import digests_of
from infra.weights.weights_error import WeightsError
from producers.engines import scatter
from producers.engines.pinned_uploads import PinnedUploads
from producers.engines.scatter import Write
from producers.engines.staged_hashes import StagedHashes

DTYPES = [torch.uint8, torch.int16, torch.int32, torch.int64]
Version = list[tuple[int, torch.dtype]]
sizes = st.lists(st.tuples(st.integers(0, 300), st.sampled_from(DTYPES)), max_size=8)


def drawn(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    kind = np.dtype(str(dtype).removeprefix("torch."))
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 100, size).astype(kind))


@given(st.lists(sizes, min_size=1, max_size=3))
def test_pieces_are_whole_and_lie_apart_and_memory_is_used_again(versions: list[Version]) -> None:
    uploads, most = PinnedUploads(pin=False, block=256), 0
    for version in versions:
        uploads.begin()
        put = [drawn(size, dtype, n) for n, (size, dtype) in enumerate(version)]
        places = [list(uploads.pieces(values)) for values in put]
        for values, pieces in zip(put, places, strict=True):  # the last one has overwritten none before
            whole = torch.empty_like(values)
            for place, piece in pieces:
                whole[place] = piece
            assert torch.equal(whole, values)
            assert all(piece.data_ptr() % 64 == 0 for _, piece in pieces)
        most = max(most, sum(-(-values.nbytes // 64) * 64 for values in put))
        assert len(uploads._blocks) <= -(-most // 256)


def test_values_are_uploaded_as_they_are() -> None:
    uploads, values = PinnedUploads(pin=False, block=128), drawn(1000, torch.int16, 0)
    assert torch.equal(uploads.upload(values, torch.device("cpu")), values)
    uploads.finish()


def test_changes_stay_outside_where_a_gpu_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three versions of two tensors each: half of what is free may be taken, by all of a version."""
    free, uploads = [1300], PinnedUploads(pin=False, block=256)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0] - 50, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 150)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(scatter, "_AT_ONCE", 20)
    for room, inside in ((1300, [True, False]), (100, [False, False]), (3000, [True, True])):
        free[0], writes, held, wanted = room, list[list[Write]](), list[torch.Tensor](), list[torch.Tensor]()
        uploads.begin()
        for seed in range(2):  # 100 changes of 2 bytes, at places of 4
            values, target = drawn(100, torch.int16, seed), drawn(500, torch.int16, 9)
            places = torch.randperm(500, generator=torch.Generator().manual_seed(seed))[:100].int()
            writes.append(list(Write.to_gpu(target, places, values, uploads)))
            held.append(target)
            wanted.append(target.index_copy(0, places.long(), values))
        assert [len(one) == 1 for one in writes] == inside
        for write in (write for one in writes for write in one):
            write.do()
        assert all(map(torch.equal, held, wanted))


@pytest.mark.parametrize(("free", "early"), [(10_000, 2), (2400, 1), (100, 0)])
def test_some_whole_tensors_come_before_the_pause(
    free: int, early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both of two versions: as many as may, and no more than an eighth of what is free."""
    uploads, device = PinnedUploads(pin=False, block=256, ahead=450), torch.device("cpu")
    for seen, value in (("mem_get_info", (free, 1 << 40)), ("memory_reserved", 0), ("memory_allocated", 0)):
        monkeypatch.setattr(torch.cuda, seen, lambda device, value=value: value)
    for version in range(2):
        uploads.begin()
        values = [drawn(100, torch.int16, 10 * version + n) for n in range(3)]
        held = [torch.zeros(100, dtype=torch.int16) for _ in values]
        writes = [list(Write.to_gpu(held[n], None, values[n], uploads)) for n in range(3)]
        blocks = {one.untyped_storage().data_ptr() for one in uploads._blocks}
        outside = [one.values.untyped_storage().data_ptr() in blocks for each in writes for one in each]
        assert outside[:early] == [False] * early and all(outside[early:])
        assert uploads.fit(free // 2 - 200 * early, device)
        for write in (write for each in writes for write in each):
            write.do()
        assert all(map(torch.equal, held, values))


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6), st.sampled_from([4, 16, 64, 4096]))
def test_hashes_are_those_of_whole_tensors(shapes: list[list[int]], piece: int) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    tensors = {str(n): torch.randn(shape).to(kinds[n % 3]) for n, shape in enumerate(shapes)}
    assert StagedHashes(pin=False, piece=piece).digests(tensors) == digests_of(tensors)


def test_many_threads_find_the_same_hash() -> None:
    tensors = {"a": drawn(5 << 20, torch.int32, 1), "b": torch.zeros(())}
    assert StagedHashes(pin=False).digests(tensors) == digests_of(tensors)


def test_a_type_that_safetensors_lacks_has_no_hash() -> None:
    with pytest.raises(WeightsError, match=r"tensors of torch\.complex128 can't be sent"):
        StagedHashes(pin=False).digests({"a": torch.zeros(2, dtype=torch.complex128)})

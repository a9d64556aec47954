"""A state that ranks wrote part by part: read whole or in pieces, and never if it is damaged."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumers.learners import state_pieces
from consumers.learners.snapshot import PartPlace, StateSnapshot
from consumers.learners.state_pieces import InPieces, elements_of, pieces
from consumers.steps import state_parts
from consumers.steps.checkpoint import Checkpoints, Damaged, RunPosition
from consumers.steps.checkpoint_manifest import DividedManifest
from consumers.steps.divided_state import DividedState
from consumers.steps.state_layout import layout_of
from consumers.steps.state_parts import write_part
from infra.keys import KeyRing
from infra.ranks.rank_addresses import RanksError
from infra.stores.file_store import FileStore
from infra.waiting import WaitedTooLong
from infra.weights.manifest import Tensor

SHAPES = {"weights.a": (37, 3), "weights.b": (2, 2, 2), "optimizer.exp_avg.a": (37, 3)}
WHOLE = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()
}
OWN = {"steps": torch.tensor(3), "rng": torch.arange(50, dtype=torch.uint8)}
RANKS = 3
AT: dict[str, Any] = {"step": 2, "root": "r", "positions": {0: 5}, "ledger": 1, "trainer_epoch": 0}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_pieces, "LARGEST_PIECE", 16)


def part_of(rank: int, ranks: int = RANKS) -> StateSnapshot:
    live: dict[str, torch.Tensor] = {}
    for name, tensor in WHOLE.items():
        most = -(-tensor.shape[0] // ranks)
        rows, width = tensor[most * rank : most * (rank + 1)], math.prod(tensor.shape[1:])
        live |= pieces(name, min(most * rank, tensor.shape[0]) * width, rows.reshape(-1))
    return StateSnapshot(live, OWN if rank == 0 else {}, shapes=SHAPES, ranks=ranks)


class World:
    """A store with a checkpoint of three ranks, and an older one of iteration 1 in one file."""

    def __init__(self, folder: Path, keys: KeyRing | None = None) -> None:
        self.folder, self.keys, self.told = folder, keys or KeyRing(), list[str]()
        self.store = FileStore(f"file://{folder}")
        self.checkpoints = Checkpoints(self.store, "r-1", self.keys)
        self.checkpoints.save(WHOLE | OWN, RunPosition(iteration=1, **AT), keep=9)
        self.place = self.checkpoints.place(2, 0)

    def write(self, *ranks: int) -> None:
        for rank in ranks:
            write_part(self.store, self.place, rank, part_of(rank), self.keys)

    def commit(self, deadline_s: float = 60, check: Callable[[], None] = lambda: None) -> None:
        writing = self.checkpoints.begin(part_of(0), self.place)
        at = RunPosition(iteration=2, **AT)
        self.checkpoints.save(writing, at, keep=9, deadline_s=deadline_s, check=check)

    def saved(self) -> World:
        self.write(1, 2)
        self.commit()
        return self

    def file(self, name: str) -> Path:
        return self.folder / state_parts.folder_of(self.place) / name

    def newest(self) -> int:
        found = self.checkpoints.latest(self.told.append)
        assert found is not None
        assert_same(found[1])
        return found[0].iteration


def assert_same(state: Mapping[str, torch.Tensor]) -> None:
    assert set(state) == set(WHOLE | OWN)
    assert all(torch.equal(state[name], tensor) for name, tensor in (WHOLE | OWN).items())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


def test_it_is_read_whole_and_in_pieces(world: World) -> None:
    assert world.saved().newest() == 2
    state = world.checkpoints.stored(world.place)
    assert isinstance(state, DividedState)
    assert isinstance(state, InPieces)
    assert state.outlines == [(name, str(one.dtype)[6:], list(one.shape)) for name, one in state.items()]
    assert elements_of({"other": WHOLE["weights.a"]}, "weights.a", 0, 1) is None
    for name, whole in WHOLE.items():
        flat = whole.reshape(-1)
        for size in (1, 7, 40, flat.numel()):
            for first in range(0, flat.numel(), size):
                expected = flat[first : first + size]
                for held in (state, WHOLE):
                    found = elements_of(held, name, first, expected.numel())
                    assert found is not None
                    assert torch.equal(found, expected)
    assert elements_of(state, "weights.c", 0, 1) is None
    assert sorted(file.name for file in world.file("").iterdir()) == [
        "manifest.json", *(f"state-0000{rank}.safetensors" for rank in range(RANKS)),
    ]  # fmt: skip


def test_rows_are_read_without_the_files_of_others(world: World) -> None:
    world.saved().file("state-00002.safetensors").unlink()
    state = world.checkpoints.stored(world.place)
    found = elements_of(state, "weights.a", 12, 60)
    assert found is not None
    assert torch.equal(found, WHOLE["weights.a"].reshape(-1)[12:72])


@pytest.mark.parametrize("part", range(RANKS))
@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_a_damaged_part_makes_it_older(world: World, part: int, how: str) -> None:
    file = world.saved().file(f"state-{part:05d}.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 4
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(raw if how == "flipped" else raw[:-3])
    assert world.newest() == 1
    assert f"state-{part:05d}" in world.told[0]


def test_it_is_not_there_until_all_ranks_have_written(world: World) -> None:
    world.write(1)
    committing = threading.Thread(target=world.commit)
    committing.start()
    assert world.newest() == 1
    world.write(2)
    committing.join(60)
    assert world.newest() == 2


def test_a_rank_that_does_not_write_is_named(world: World) -> None:
    world.write(1)
    with pytest.raises(WaitedTooLong, match=r"rank 2 to write its part .* must reach the same store"):
        world.commit(deadline_s=0.2)
    assert world.newest() == 1


def test_a_rank_that_has_ended_ends_the_wait(world: World) -> None:
    ended = threading.Event()

    def check() -> None:
        if ended.is_set():
            raise RanksError("rank 1 was killed")

    threading.Timer(0.1, ended.set).start()
    with pytest.raises(RanksError, match="rank 1 was killed"):
        world.commit(deadline_s=math.inf, check=check)
    assert world.newest() == 1


def test_a_rank_that_writes_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its count grows while the deadline passes again and again."""
    world.write(2)
    counts = iter(range(9))

    def check() -> None:  # called before each look
        if (count := next(counts, None)) is None:
            world.write(1)
        else:
            world.store.put(state_parts._count_key(world.place, 1), str(count).encode())

    monkeypatch.setattr(state_parts, "_LOOK_S", 0.05)
    world.commit(deadline_s=0.1, check=check)
    assert world.newest() == 2
    assert not list(world.file("").glob("*.count"))


def test_more_elements_than_there_are_are_damage(world: World) -> None:
    state = world.saved().checkpoints.stored(world.place)
    with pytest.raises(Damaged, match=r"weights.a of the checkpoint has shape \[37, 3\]"):
        elements_of(state, "weights.a", 100, 12)


@pytest.mark.parametrize("lie", ["rank", "iteration", "digest", "text", "many", "shape"])
def test_a_rank_that_lies_is_refused(world: World, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world.write(1)
    place, keys = world.place, world.keys
    if lie == "iteration":
        other = PartPlace(place.store, place.run, 7, place.trainer_epoch)
        write_part(world.store, other, 2, part_of(2), keys)
        raw = world.store.get(state_parts._said_key(other, 2))
    elif lie == "rank":
        raw = world.store.get(state_parts._said_key(place, 1))
    elif lie == "shape":  # elements that another rank has
        write_part(world.store, place, 2, part_of(1), keys)
        raw = world.store.get(state_parts._said_key(place, 2))
    else:
        world.write(2)
        raw = world.store.get(state_parts._said_key(place, 2))
        raw = {"digest": raw.replace(b"e", b"f", 1), "text": b"[]", "many": raw + b" "}[lie]
    world.store.put(state_parts._said_key(place, 2), raw)
    with pytest.raises(Damaged, match=r"state-00002\.json|have element"):
        world.commit()
    assert world.newest() == 1


def tensor(*shape: int, dtype: str = "F32") -> Tensor:
    return Tensor(dtype=dtype, shape=shape, digest="0")


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([{"a[0:4]": tensor(4)}], "4 elements instead of 6"),
        ([{"a[0:4]": tensor(4)}, {"a[3:6]": tensor(3)}], "element 3 not once"),
        ([{"a[0:2]": tensor(2)}, {"a[4:6]": tensor(2)}], "element 2 not once"),
        ([{"a[0:4]": tensor(4)}, {"a[0:4]": tensor(4), "a[4:6]": tensor(2)}], "not once"),
        ([{"a[0:6]": tensor(5)}], r"piece a\[0:6\] has shape \[5\]"),
        ([{"a[0:6]": tensor(2, 3)}], "has shape"),
        ([{"a[6:0]": tensor(6)}], "has shape"),
        ([{"a[0:4]": tensor(4), "a[4:6]": tensor(2, dtype="F16")}], "several types"),
        ([{"a[0:6]": tensor(6), "a": tensor(6)}], "a is there twice"),
        ([{"a[0:6]": tensor(6), "b": tensor(6)}, {"b": tensor(6)}], "b is there twice"),
        ([{}], "0 elements"),
    ],
)
def test_pieces_that_are_no_tensor_are_refused(parts: list[dict[str, Tensor]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        layout_of({"a": (2, 3)}, parts)


def test_a_manifest_of_such_pieces_is_damaged(world: World) -> None:
    manifest = world.checkpoints._manifest(f"{state_parts.folder_of(world.saved().place)}/manifest.json")
    assert isinstance(manifest, DividedManifest)
    said = manifest.model_dump(mode="json")
    del said["parts"][1]
    with pytest.raises(ValueError, match="not once"):
        DividedManifest.model_validate(said)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.data())
def test_each_element_is_found_however_it_is_cut(cuts: list[int], data: st.DataObject) -> None:
    flat, at, parts = torch.arange(float(sum(cuts))), 0, list[dict[str, torch.Tensor]]()
    for count in cuts:
        parts.append(pieces("a", at, flat[at : at + count]))
        at += count
    layout = layout_of(
        {"a": (at,)}, [{name: tensor(one.numel()) for name, one in part.items()} for part in parts]
    )["a"]
    found = [parts[piece.part][piece.name] for piece in layout.pieces]
    assert torch.equal(torch.cat([torch.zeros(0), *found]), flat)
    assert all(one.numel() <= 16 for one in found)

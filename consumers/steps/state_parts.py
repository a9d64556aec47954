"""The parts of a state that other ranks write. Each says what it wrote in a small object beside its file.

rank 1   state-00001.safetensors, then state-00001.json ──┐
rank 2   state-00002.safetensors, then state-00002.json ──┴──► rank 0: the manifest, which has all of it
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from consumers.learners.snapshot import PartPlace, StateSnapshot
from consumers.steps import checkpoint_state as states
from consumers.steps.checkpoint_manifest import LARGEST_MANIFEST, Damaged, checkpoint_name, state_name
from infra.keys import KeyRing, KeysError
from infra.sealed import canonical_json, sealed, unseal
from infra.stores.store import Missing, Store
from infra.waiting import Wait
from infra.weights.manifest import Tensor

_KIND = "part of a checkpoint"
_LOOK_S = 0.2
_TELL_S = 10.0
_SLOWER = 3  # times as long as rank 0's part may others take


class _Part(BaseModel):
    """The content of a rank's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    iteration: int
    trainer_epoch: int
    rank: int
    tensors: dict[str, Tensor]


def folder_of(place: PartPlace) -> str:
    """Return the folder of a checkpoint in its store."""
    return f"runs/{place.run}/checkpoints/{checkpoint_name(place.iteration, place.trainer_epoch)}"


def _count_key(place: PartPlace, rank: int) -> str:
    return f"{folder_of(place)}/state-{rank:05d}.count"


def _said_key(place: PartPlace, rank: int) -> str:
    return f"{folder_of(place)}/state-{rank:05d}.json"


def write_part(store: Store, place: PartPlace, rank: int, state: StateSnapshot, keys: KeyRing) -> None:
    """Write a rank's part, and say so. While it is written, a count of its pieces grows beside it."""
    pieces, said_at = 0, time.monotonic()

    def moved() -> None:
        nonlocal pieces, said_at
        pieces += 1
        if time.monotonic() - said_at > _TELL_S:
            store.put(_count_key(place, rank), str(pieces).encode())
            said_at = time.monotonic()

    try:
        tensors = states.write(store, f"{folder_of(place)}/{state_name(rank)}", state, moved)
    finally:
        state.abandon()
    part = _Part(
        run=place.run,
        iteration=place.iteration,
        trainer_epoch=place.trainer_epoch,
        rank=rank,
        tensors=tensors,
    )
    store.put(_said_key(place, rank), sealed(part.model_dump(mode="json"), keys, _KIND))


def other_parts(
    store: Store, place: PartPlace, ranks: int, keys: KeyRing, *, took_s: float, deadline_s: float,
    moved: Callable[[], None], check: Callable[[], None],
) -> list[Mapping[str, Tensor]]:  # fmt: skip
    """Return the content of the files of ranks 1 and on, when all of them are written.

    `took_s`: for rank 0's part. `moved` is called whenever another one has written more, and `check` again
    and again: it raises if a rank has ended.
    """
    found = []
    for rank in range(1, ranks):
        wait = Wait(
            f"rank {rank} to write its part of the checkpoint of iteration {place.iteration} to {store.url}",
            unblocked_by=f"rank {rank}, which must reach the same store",
            deadline_s=deadline_s + _SLOWER * took_s,
        )
        written = None
        while (raw := _said(store, _said_key(place, rank))) is None:
            check()
            if written != (written := _said(store, _count_key(place, rank))):
                wait.progress()
                moved()
            wait.check()
            time.sleep(_LOOK_S)
        found.append(_read(raw, store, place, rank, keys))
    return found


def _said(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key, LARGEST_MANIFEST)
    except Missing:
        return None


def _read(raw: bytes, store: Store, place: PartPlace, rank: int, keys: KeyRing) -> Mapping[str, Tensor]:
    where = f"{store.url}/{_said_key(place, rank)}"
    try:
        said = json.loads(raw)
        if not isinstance(said, dict) or canonical_json(said) != raw:
            raise ValueError("its bytes are not as StreamRL wrote them")
        unseal(said, keys, where, _KIND)
        part = _Part.model_validate(said)
    except KeysError as error:
        raise Damaged(str(error)) from error
    except (ValidationError, ValueError, RecursionError) as error:
        raise Damaged(f"{where} does not say what rank {rank} wrote: {str(error)[:500]}") from error
    if (part.run, part.iteration, part.trainer_epoch, part.rank) != (
        place.run, place.iteration, place.trainer_epoch, rank,
    ):  # fmt: skip
        raise Damaged(f"{where} is of another checkpoint or rank")
    return part.tensors


def forget_said(store: Store, place: PartPlace, ranks: int) -> None:
    """Remove what the ranks said: the manifest has it now."""
    for rank in range(1, ranks):
        store.delete(_said_key(place, rank))
        store.delete(_count_key(place, rank))

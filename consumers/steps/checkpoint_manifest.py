"""A checkpoint's manifest: bytes with a digest of all they say, and a signature if there are keys.

Formats 2 and 3 are canonical JSON: bytes that differ are damage, even if they mean the same. Format 2 is of a
state in one file, format 3 of one that ranks wrote part by part. Format 1, which older versions of StreamRL
wrote, has a digest of the state alone; it is read only if no signature is required.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from consumers.steps.state_layout import all_tensors, layout_of
from infra.keys import KeyRing, KeysError
from infra.sealed import canonical_json, sealed, unseal
from infra.stores.store import StoreError
from infra.weights.bits import MOST_SIDES, NAMES
from infra.weights.manifest import Side, Tensor, TensorName

LARGEST_MANIFEST = 64 << 20  # bytes of a manifest
KIND = "checkpoint"  # the kind of object, in signatures
_NAME = re.compile(r"i(\d{6,18})-e(\d{2,9})")

Number = Annotated[int, Field(ge=0, lt=1 << 62)]


class Damaged(StoreError):
    """A checkpoint that can't be read."""


class AnyCheckpointManifest(BaseModel):
    """The manifest of one checkpoint, which is the state between two iterations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    iteration: Number  # the next one to train
    step: Number  # the next optimizer step
    root: str  # of the weights
    positions: dict[Number, Number]  # by partition of `<run>.samples`: samples before it are trained
    ledger: Number  # position in `<run>.ledger`: the steps behind it are taken again from their records
    letters: Number | None = None  # position in `<run>.dead`: letters before it are of no interest any more
    roots: dict[Number, str] = {}  # of versions whose samples may still come
    taken: list[Number] = []  # groups that are trained, of those that could still be (order arrival)
    redrawn: list[Number] = []  # those of them in whose place others are drawn
    trainer_epoch: Number
    state: str  # key of the state's object
    created_at: FiniteFloat


class CheckpointManifest(AnyCheckpointManifest):
    """The manifest of a state in one file."""

    format: Literal[2]
    tensors: dict[str, Tensor]  # of the state


class DividedManifest(AnyCheckpointManifest):
    """The manifest of a state of which each rank wrote a part: whole tensors, and pieces of others."""

    format: Literal[3]
    shapes: dict[TensorName, Annotated[tuple[Side, ...], Field(max_length=MOST_SIDES)]]  # of those others
    parts: Annotated[list[dict[str, Tensor]], Field(min_length=1)]  # the content of each rank's file

    @model_validator(mode="after")
    def _pieces_fit(self) -> DividedManifest:
        layout_of(self.shapes, self.parts)
        return self


class FirstManifest(AnyCheckpointManifest):
    """The manifest as it was written at first."""

    format: Literal[1]
    digest: str  # of the state's object


StoredManifest = CheckpointManifest | DividedManifest | FirstManifest


def checkpoint_name(iteration: int, trainer_epoch: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"i{iteration:06d}-e{trainer_epoch:02d}"


def numbers_of(folder: str) -> tuple[int, int] | None:
    """Return iteration and start of the trainer from a folder's name; None if it is no checkpoint's."""
    found = _NAME.fullmatch(folder)
    return (int(found[1]), int(found[2])) if found else None


def state_name(part: int | None) -> str:
    """Return the name of a state's file, or of the file of one of its parts."""
    return "state.safetensors" if part is None else f"state-{part:05d}.safetensors"


def written(manifest: CheckpointManifest | DividedManifest, ring: KeyRing) -> bytes:
    """Return the bytes of a manifest, with digest and signature. Raise StoreError if it is too large."""
    said = manifest.model_dump(mode="json", exclude_unset=True)
    raw = sealed(said, ring, KIND)
    if len(raw) > LARGEST_MANIFEST:
        raise StoreError(
            f"the checkpoint of iteration {manifest.iteration} can't be committed: its manifest would have "
            f"{len(raw)} bytes, and {LARGEST_MANIFEST} are allowed. Fewer ranks (trainer.ranks) make fewer "
            "pieces"
        )
    return raw


def read_checkpoint_manifest(raw: bytes, where: str, ring: KeyRing) -> StoredManifest:
    """Parse the bytes of a manifest. Raises Damaged, which says what is wrong with them."""
    try:
        said = json.loads(raw)
        if not isinstance(said, dict):
            raise ValueError("it is no JSON object")
        if said.get("format") == 1:
            ring.verify(b"", None, where)  # format 1 has no signature
            return FirstManifest.model_validate(said)
        _check(said, raw, where, ring)
        found: CheckpointManifest | DividedManifest
        if said.get("format") == 3:
            found, tensors = (divided := DividedManifest.model_validate(said)), all_tensors(divided.parts)
        else:
            found, tensors = (whole := CheckpointManifest.model_validate(said)), list(whole.tensors.items())
    except KeysError as error:
        raise Damaged(str(error)) from error
    except (ValidationError, ValueError, RecursionError) as error:
        raise Damaged(f"{where} is not a checkpoint's manifest: {str(error)[:500]}") from error
    for name, tensor in tensors:
        if tensor.dtype not in NAMES:
            raise Damaged(f"{where}: tensor {name} has an unknown type, {tensor.dtype}")
    return found


def _check(said: dict[str, Any], raw: bytes, where: str, ring: KeyRing) -> None:
    """Raise unless digest and signature are those of the rest; take both out of `said`."""
    if canonical_json(said) != raw:
        raise ValueError("its bytes are not as StreamRL wrote them")
    unseal(said, ring, where, KIND)

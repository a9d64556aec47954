"""What a checkpoint's manifest says, as bytes that carry a digest of all, and a signature if there are keys.

Format 2 is canonical JSON: other bytes of the same meaning are damage as well. Format 1, of older versions,
had a digest of the state alone; it is read where no signatures are asked for.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from infra.keys import KeyRing, KeysError
from infra.stores.store import StoreError
from infra.weights.bits import NAMES
from infra.weights.manifest import Tensor

LARGEST_MANIFEST = 64 << 20  # bytes of a manifest
KIND = "checkpoint"  # of what is signed
_NAME = re.compile(r"i(\d{6,18})-e(\d{2,9})")

Number = Annotated[int, Field(ge=0, lt=1 << 62)]


class Damaged(StoreError):
    """A checkpoint that can't be read."""


class AnyCheckpointManifest(BaseModel):
    """One checkpoint: the state between two iterations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    iteration: Number  # the next one to train
    step: Number  # the next optimizer step
    root: str  # of the weights
    positions: dict[Number, Number]  # by partition of `<run>.samples`: what lies before is trained
    ledger: Number  # position in `<run>.ledger`: the steps behind it are run again from their records
    letters: Number | None = None  # position in `<run>.dead`: letters before it are of no interest any more
    roots: dict[Number, str] = {}  # of versions whose samples may still come
    trainer_epoch: Number
    state: str  # key of the state's object
    created_at: FiniteFloat


class CheckpointManifest(AnyCheckpointManifest):
    """As it is written now."""

    format: Literal[2]
    tensors: dict[str, Tensor]  # of the state


class FirstManifest(AnyCheckpointManifest):
    """As it was written at first."""

    format: Literal[1]
    digest: str  # of the state's object


def checkpoint_name(iteration: int, trainer_epoch: int) -> str:
    """The folder of a checkpoint."""
    return f"i{iteration:06d}-e{trainer_epoch:02d}"


def numbers_of(folder: str) -> tuple[int, int] | None:
    """Iteration and start of the trainer, of a folder's name; None if it is no checkpoint's."""
    found = _NAME.fullmatch(folder)
    return (int(found[1]), int(found[2])) if found else None


def written(manifest: CheckpointManifest, ring: KeyRing) -> bytes:
    """The bytes of a manifest."""
    said = manifest.model_dump(mode="json", exclude_unset=True)
    if (signature := ring.sign(_canonical(said), KIND)) is not None:
        said["signature"] = signature
    said["digest"] = _digest(said)
    return _canonical(said)


def read_checkpoint_manifest(raw: bytes, where: str, ring: KeyRing) -> CheckpointManifest | FirstManifest:
    """The manifest that some bytes are. Raises Damaged with what is wrong with them."""
    try:
        said = json.loads(raw)
        if not isinstance(said, dict):
            raise ValueError("it is no JSON object")
        if said.get("format") == 1:
            ring.verify(b"", None, where)  # nobody has signed it
            return FirstManifest.model_validate(said)
        _check(said, raw, where, ring)
        found = CheckpointManifest.model_validate(said)
    except KeysError as error:
        raise Damaged(str(error)) from error
    except (ValidationError, ValueError, RecursionError) as error:
        raise Damaged(f"{where} is not a checkpoint's manifest: {str(error)[:500]}") from error
    if unknown := [name for name, tensor in found.tensors.items() if tensor.dtype not in NAMES]:
        raise Damaged(f"{where}: {unknown[0]} has an unknown type, {found.tensors[unknown[0]].dtype}")
    return found


def _check(said: dict[str, Any], raw: bytes, where: str, ring: KeyRing) -> None:
    """Raise unless digest and signature, which are taken out, are those of the rest."""
    if _canonical(said) != raw:
        raise ValueError("it was written otherwise than its bytes are now")
    digest = said.pop("digest", None)
    if digest != _digest(said):
        raise ValueError("its digest is that of another manifest")
    signature = said.pop("signature", None)
    ring.verify(_canonical(said), signature if isinstance(signature, str) else None, where, KIND)


def _canonical(said: dict[str, Any]) -> bytes:
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def _digest(said: dict[str, Any]) -> str:
    return str(blake3(_canonical(said)).hexdigest())

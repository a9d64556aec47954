"""What a version is, and how it is made: one small object that is put last, and is the only commit point.

One or more paths lead to a version: from nothing (a keyframe), or from an older version (a delta).
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.weights.bits import NAMES
from infra.weights.errors import WeightsError


class Part(BaseModel):
    """Strict: what we don't know is another format."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tensor(Part):
    """One tensor of a version."""

    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * NAMES[self.dtype][1]


class Chunk(Part):
    """An object that holds some of what changes; its name is a hash of it."""

    hash: str
    size: int


class Path(Part):
    """One way to get the version."""

    since: int | None  # the version that it begins with; None: it needs nothing
    root: str | None = None  # of that version
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Bytes to be fetched."""
        return sum(chunk.size for chunk in self.chunks)


class Manifest(Part):
    """A version."""

    format: Literal[2] = 2
    run: str
    version: int
    root: str
    tensors: dict[str, Tensor]
    paths: tuple[Path, ...] = Field(min_length=1)
    files: dict[str, Chunk] = {}  # what lies beside the tensors: config and tokenizer
    base: str | None = None  # of an adapter: root of the model that it belongs to
    previous: str | None = None  # hash of the manifest before this one, if there was one
    trainer_epoch: int
    created_at: float
    signature: str | None = None

    @property
    def digests(self) -> dict[str, str]:
        """Hash of each tensor."""
        return {name: tensor.digest for name, tensor in self.tensors.items()}

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    def path(self, since: int | None) -> Path | None:
        """The path that begins with a version, if there is one."""
        return next((path for path in self.paths if path.since == since), None)

    def content(self) -> bytes:
        """What is signed: everything but the signature."""
        return json.dumps(
            self.model_dump(mode="json", exclude={"signature"}), sort_keys=True, separators=(",", ":")
        ).encode()

    def hash(self) -> str:
        """What the next manifest calls this one."""
        return blake3(self.content()).hexdigest(16)


def parsed(raw: bytes, where: str) -> Manifest:
    """A manifest. Raises WeightsError with what is wrong with it."""
    try:
        said: Any = json.loads(raw)
        if isinstance(said, dict) and said.get("format") != 2:
            raise WeightsError(
                f"{where} has format {said.get('format')!r}; this version of StreamRL reads format 2"
            )
        manifest = Manifest.model_validate_json(raw)
    except (ValidationError, ValueError) as error:
        raise WeightsError(f"{where} is not a weights manifest: {error}") from error
    if unknown := [name for name, tensor in manifest.tensors.items() if tensor.dtype not in NAMES]:
        raise WeightsError(f"{where}: {unknown[0]} has an unknown type, {manifest.tensors[unknown[0]].dtype}")
    return manifest

"""What a version is, and how it is made: one small object that is put last, and is the only commit point.

One or more paths lead to a version: from nothing (a keyframe), or from an older version (a delta). One from
nothing may be put beside it later.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

import zstandard
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from infra.weights.bits import NAMES, size_of
from infra.weights.errors import WeightsError

# One beside the others: it is written into a reader's folder.
FileName = Annotated[str, Field(pattern=r"^[^./\\][^/\\]*$")]
Of = TypeVar("Of", bound="Signed")


class Part(BaseModel):
    """Strict: what we don't know is another format."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tensor(Part):
    """One tensor of a version."""

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    digest: str

    @property
    def size(self) -> int:
        """Its bytes."""
        return size_of(self.dtype, self.shape)


class Chunk(Part):
    """An object that holds some of what changes; its name is a hash of it."""

    hash: str = Field(pattern=r"^[0-9a-z]*$")  # it becomes part of a key: nothing that leads outside
    size: NonNegativeInt


class Path(Part):
    """One way to get the version."""

    since: int | None  # the version that it begins with; None: it needs nothing
    root: str | None = None  # of that version
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Bytes to be fetched."""
        return sum(chunk.size for chunk in self.chunks)


class Signed(Part):
    """What says of which version of what it is, and may be signed."""

    format: Literal[2] = 2
    run: str
    version: int
    root: str
    created_at: float
    signature: str | None = None

    def content(self) -> bytes:
        """What is signed: everything but the signature."""
        return json.dumps(
            self.model_dump(mode="json", exclude={"signature"}), sort_keys=True, separators=(",", ":")
        ).encode()


class Keyframe(Signed):
    """A path from nothing that a version was given later: manifests are put once, and never change."""

    chunks: tuple[Chunk, ...]


class Manifest(Signed):
    """A version."""

    tensors: dict[str, Tensor]
    paths: tuple[Path, ...] = Field(min_length=1)
    files: dict[FileName, Chunk] = {}  # what lies beside the tensors: config and tokenizer
    base: str | None = None  # of an adapter: root of the model that it belongs to
    previous: str | None = None  # hash of the manifest before this one, if there was one
    trainer_epoch: int

    @property
    def digests(self) -> dict[str, str]:
        """Hash of each tensor."""
        return {name: tensor.digest for name, tensor in self.tensors.items()}

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def chunks(self) -> list[Chunk]:
        """All objects that it names."""
        return [*(chunk for path in self.paths for chunk in path.chunks), *self.files.values()]

    def path(self, since: int | None) -> Path | None:
        """The path that begins with a version, if there is one."""
        return next((path for path in self.paths if path.since == since), None)

    @property
    def raw(self) -> bytes:
        """As it lies in the store."""
        return self.model_dump_json().encode()

    @property
    def packed(self) -> bytes:
        """The same, smaller."""
        return zstandard.compress(self.raw)

    def hash(self) -> str:
        """What the next manifest calls this one."""
        return blake3(self.content()).hexdigest(16)


def unpacked(data: bytes, where: str) -> bytes:
    """A manifest that was packed, as it lies in the store."""
    try:
        return zstandard.decompress(data)
    except zstandard.ZstdError as error:
        raise WeightsError(f"{where} was packed wrongly: {error}") from error


def parsed(raw: bytes, where: str) -> Manifest:
    """A manifest. Raises WeightsError with what is wrong with it."""
    manifest = read(raw, Manifest, where)
    if unknown := [name for name, tensor in manifest.tensors.items() if tensor.dtype not in NAMES]:
        raise WeightsError(f"{where}: {unknown[0]} has an unknown type, {manifest.tensors[unknown[0]].dtype}")
    return manifest


def read(raw: bytes, kind: type[Of], where: str) -> Of:
    """A manifest or a keyframe, of the format that is understood here."""
    try:
        said: Any = json.loads(raw)
        if isinstance(said, dict) and said.get("format") != 2:
            raise WeightsError(
                f"{where} has format {said.get('format')!r}; this version of StreamRL reads format 2"
            )
        return kind.model_validate_json(raw)
    except (ValidationError, ValueError) as error:
        raise WeightsError(f"{where} is not a weights {kind.__name__.lower()}: {error}") from error

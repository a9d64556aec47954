"""What a version is, and how it is made: one small object that is put last, and is the only commit point.

One or more paths lead to a version: from nothing (a keyframe), or from an older version (a delta). One from
nothing may be put beside it later.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal, TypeVar

import zstandard
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.weights import limits
from infra.weights.bits import LARGEST_SIDE, MOST_SIDES, is_type, size_of
from infra.weights.digest import root_digest
from infra.weights.weights_error import WeightsError, damaged

# One beside the others: it is written into a reader's folder.
FileName = Annotated[str, Field(pattern=r"^[^./\\\x00][^/\\\x00]*$", max_length=255)]
TensorName = Annotated[str, Field(min_length=1, max_length=1024)]
Side = Annotated[int, Field(ge=0, lt=LARGEST_SIDE)]
ManifestVersion = Annotated[int, Field(ge=0, lt=1 << 31)]
Digest = Annotated[str, Field(max_length=128)]
_Part = TypeVar("_Part", bound="Signed")
_METADATA = "__metadata__"  # of a safetensors file: no tensor has this name


class StrictPart(BaseModel):
    """Strict: what we don't know is another format."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tensor(StrictPart):
    """One tensor of a version."""

    dtype: Annotated[str, Field(max_length=16)]
    shape: Annotated[tuple[Side, ...], Field(max_length=MOST_SIDES)]
    digest: Digest

    @property
    def size(self) -> int:
        """Its bytes."""
        return size_of(self.dtype, self.shape)


class Chunk(StrictPart):
    """An object that holds some of what changes; its name is a hash of it."""

    # it becomes part of a key: nothing that leads outside
    hash: str = Field(pattern=r"^[0-9a-z]*$", max_length=128)
    size: int = Field(ge=0, le=limits.LARGEST_CHUNK)


class Path(StrictPart):
    """One way to get the version."""

    since: ManifestVersion | None  # the version that it begins with; None: it needs nothing
    root: Digest | None = None  # of that version
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Bytes to be fetched."""
        return sum(chunk.size for chunk in self.chunks)


class Signed(StrictPart):
    """What says of which version of what it is, and may be signed."""

    format: Literal[2] = 2
    run: Annotated[str, Field(max_length=512)]
    version: ManifestVersion
    root: Digest
    created_at: Annotated[float, Field(allow_inf_nan=False)]
    signature: Annotated[str, Field(max_length=1024)] | None = None

    def content(self) -> bytes:
        """What is signed: everything but the signature."""
        return json.dumps(
            self.model_dump(mode="json", exclude={"signature"}), sort_keys=True, separators=(",", ":")
        ).encode()


class Keyframe(Signed):
    """A path from nothing that a version was given later: manifests are put once, and never change."""

    model_config = ConfigDict(title="keyframe")

    chunks: tuple[Chunk, ...]


class VersionManifest(Signed):
    """A version."""

    model_config = ConfigDict(title="manifest")

    tensors: dict[TensorName, Tensor]
    paths: tuple[Path, ...] = Field(min_length=1, max_length=64)
    # what lies beside the tensors: config and tokenizer
    files: Annotated[dict[FileName, Chunk], Field(max_length=256)] = {}
    base: Digest | None = None  # of an adapter: root of the model that it belongs to
    previous: Digest | None = None  # hash of the manifest before this one, if there was one
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


def parsed(raw: bytes, where: str) -> VersionManifest:
    """A manifest. Raises WeightsError with what is wrong with it."""
    with damaged(where):
        return _checked(read_signed(raw, VersionManifest, where), where)


def _checked(manifest: VersionManifest, where: str) -> VersionManifest:
    for name, tensor in manifest.tensors.items():
        if not is_type(tensor.dtype) or name == _METADATA:
            raise WeightsError(f"{where}: {name} has an unknown type, {tensor.dtype}")
    try:
        size = manifest.size
    except ValueError as error:
        raise WeightsError(f"{where} is not a weights manifest: {error}") from error
    if size > (most := limits.largest_model()):
        raise WeightsError(
            f"{where} is of a model of {size} bytes, and {most} are the most that is read here: set "
            f"{limits.LARGEST_MODEL_VARIABLE} if this machine can hold more"
        )
    if manifest.root != root_digest(manifest.digests):
        raise WeightsError(f"{where} is damaged: its root is not that of its tensors")
    return manifest


def read_signed(raw: bytes, kind: type[_Part], where: str) -> _Part:
    """A manifest or a keyframe, of the format that is understood here."""
    said = limits.json_in(raw, where)
    try:
        if isinstance(said, dict) and said.get("format") != 2:
            raise WeightsError(
                f"{where} has format {str(said.get('format'))[:64]}; this version of StreamRL reads format 2"
            )
        return kind.model_validate(said)
    except ValidationError as error:
        raise WeightsError(
            f"{where} is not a weights {kind.model_config['title']}: {str(error)[:2000]}"
        ) from error

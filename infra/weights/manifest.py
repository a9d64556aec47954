"""The manifest of a version: a small object that is put last, and is the only commit point.

One or more paths lead to a version: from nothing (a keyframe), or from an older version (a delta). A keyframe
may also be put beside the manifest later.
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

# A plain name, without a folder: readers write such files into a folder of theirs.
FileName = Annotated[str, Field(pattern=r"^[^./\\\x00][^/\\\x00]*$", max_length=255)]
TensorName = Annotated[str, Field(min_length=1, max_length=1024)]
Side = Annotated[int, Field(ge=0, lt=LARGEST_SIDE)]
ManifestVersion = Annotated[int, Field(ge=0, lt=1 << 31)]
Digest = Annotated[str, Field(max_length=128)]
_Part = TypeVar("_Part", bound="Signed")
_METADATA = "__metadata__"  # a key in safetensors' headers: no tensor may have this name


class StrictPart(BaseModel):
    """A part of a manifest. An unknown field is an error, for it means another format."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tensor(StrictPart):
    """Type, shape and hash of one tensor of a version."""

    dtype: Annotated[str, Field(max_length=16)]
    shape: Annotated[tuple[Side, ...], Field(max_length=MOST_SIDES)]
    digest: Digest

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return size_of(self.dtype, self.shape)


class Chunk(StrictPart):
    """Name and size of an object of the store. The name is the hash of its bytes."""

    # part of a key: so it has no characters that could lead elsewhere
    hash: str = Field(pattern=r"^[0-9a-z]*$", max_length=128)
    size: int = Field(ge=0, le=limits.LARGEST_CHUNK)


class Path(StrictPart):
    """One way to get a version: chunks to apply to an older version, or to nothing."""

    since: ManifestVersion | None  # the version that the path begins with; None: with nothing
    root: Digest | None = None  # the root of that version
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        return sum(chunk.size for chunk in self.chunks)


class Signed(StrictPart):
    """An object that says something about one version of a run, and may be signed."""

    format: Literal[2] = 2
    run: Annotated[str, Field(max_length=512)]
    version: ManifestVersion
    root: Digest
    created_at: Annotated[float, Field(allow_inf_nan=False)]
    signature: Annotated[str, Field(max_length=1024)] | None = None

    def content(self) -> bytes:
        """Return the bytes that are signed: everything but the signature."""
        return json.dumps(
            self.model_dump(mode="json", exclude={"signature"}), sort_keys=True, separators=(",", ":")
        ).encode()


class Keyframe(Signed):
    """A path from nothing that a version was given after it was published: a manifest never changes."""

    model_config = ConfigDict(title="keyframe")

    chunks: tuple[Chunk, ...]


class VersionManifest(Signed):
    """The manifest that commits a version."""

    model_config = ConfigDict(title="manifest")

    tensors: dict[TensorName, Tensor]
    paths: tuple[Path, ...] = Field(min_length=1, max_length=64)
    # files beside the tensors, such as config and tokenizer
    files: Annotated[dict[FileName, Chunk], Field(max_length=256)] = {}
    base: Digest | None = None  # root of the model that an adapter is for; None: a whole model
    previous: Digest | None = None  # hash of the manifest before this one, if there was one
    trainer_epoch: int

    @property
    def digests(self) -> dict[str, str]:
        """The hash of each tensor, by name."""
        return {name: tensor.digest for name, tensor in self.tensors.items()}

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def chunks(self) -> list[Chunk]:
        """All objects that the manifest names."""
        return [*(chunk for path in self.paths for chunk in path.chunks), *self.files.values()]

    def path(self, since: int | None) -> Path | None:
        """Return the path that begins with version `since` (None: with nothing), if there is one."""
        return next((path for path in self.paths if path.since == since), None)

    @property
    def raw(self) -> bytes:
        """The manifest as JSON, as it lies in the store."""
        return self.model_dump_json().encode()

    @property
    def packed(self) -> bytes:
        """The manifest as JSON, packed by zstd."""
        return zstandard.compress(self.raw)

    def hash(self) -> str:
        """Return the hash of the signed bytes, which the next manifest gives as `previous`."""
        return blake3(self.content()).hexdigest(16)


def parsed(raw: bytes, where: str) -> VersionManifest:
    """Parse and check a manifest. Raises WeightsError with what is wrong; `where` names the manifest."""
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
    """Parse a manifest or a keyframe. Raises WeightsError unless it has format 2 and valid fields."""
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

"""The index of a step file, which comes first: all that follows has to be as it says."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from infra.errors import Explained
from infra.keys import KeyRing
from infra.sealed import canonical_json, sealed, unseal
from infra.weights.bits import NAMES
from infra.weights.folder import is_beside
from infra.weights.manifest import Tensor

STEP_FILE_FORMAT = 2
_READ = (1, STEP_FILE_FORMAT)  # files of format 1 have no prompts and no weights of versions
_KIND = "step file"  # of the content that is signed
LARGEST_INDEX = 64 << 20
LARGEST_TEXT = 64 << 20  # bytes of a file that is no tensor and holds no records
_MOST_TENSORS = 1 << 20
_RECORDS = ("ledger", "samples", "failed", "prompts")
_MOST_VERSIONS = 1024
COUNTABLE = {  # types of a tensor and of one that is counted from it
    ("F32", "F32"), ("BF16", "BF16"), ("F16", "F16"), ("BF16", "F32"), ("F16", "F32"), ("F32", "BF16"),
    ("F32", "F16"),
}  # fmt: skip

_Number = Annotated[int, Field(ge=0, lt=1 << 62)]
StepFilePart = Literal["model", "reference", "state", "version"]  # a model, a learner's state, or a version
_Text = Annotated[str, Field(max_length=4096)]


class StepFileError(Explained):
    """A step file that can't be made or read; the message names the file and what is wrong with it."""


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Member(_Said):
    """A file in the step file, but a tensor's."""

    name: Annotated[str, Field(max_length=256)]
    size: _Number
    digest: Annotated[str, Field(max_length=64)]

    @model_validator(mode="after")
    def _is_known(self) -> Member:
        folder, _, name = self.name.rpartition("/")
        known = {
            "": name == "run.json", "records": name in _RECORDS, "model": is_beside(name),
            "reference": is_beside(name),
        }  # fmt: skip
        if not known.get(folder, False):
            raise ValueError(f"it has a file {self.name[:100]!r}, which no step file has")
        if folder != "records" and self.size > LARGEST_TEXT:
            raise ValueError(f"{self.name} has {self.size:,} bytes; at most {LARGEST_TEXT:,} are allowed")
        return self


class StoredTensor(Tensor):
    """A tensor: of what, and how its bytes are laid out."""

    of: StepFilePart
    name: Annotated[str, Field(min_length=1, max_length=1024)]
    # The tensor that its bits are counted from: one of `model`, or for a version's tensor one of `state`.
    minus: Annotated[str, Field(max_length=1024)] = ""
    version: _Number | None = None  # of the weights that it is a part of; None: of none

    @model_validator(mode="after")
    def _is_readable(self) -> StoredTensor:
        if self.dtype not in NAMES:
            raise ValueError(f"tensor {self.name[:100]} has an unknown type, {self.dtype}")
        if (self.of == "version") != (self.version is not None):
            raise ValueError(f"tensor {self.name[:100]} does not say of which version it is")
        return self

    @property
    def base(self) -> StepFilePart:
        """The part of the file whose tensors its bits may be counted from."""
        return "state" if self.of == "version" else "model"


class StepFileIndex(_Said):
    """All that is in a step file."""

    format: Literal[1, 2]
    streamrl: _Text  # version of the library that made it
    run: Annotated[str, Field(min_length=1, max_length=512)]
    first: _Number  # the first step that can be taken
    last: _Number
    asked: _Number  # the step that it was made for: those before it are needed to get there
    failed: bool  # whether that step could not be taken when the run came to it
    made_on: _Text
    created_at: Annotated[float, Field(allow_inf_nan=False)]
    partitions: Annotated[int, Field(ge=1, le=1 << 15)]  # of the topic with the samples
    samples_of: Annotated[str, Field(min_length=1, max_length=512)]  # run whose samples were trained
    members: Annotated[tuple[Member, ...], Field(max_length=1024)]
    tensors: Annotated[tuple[StoredTensor, ...], Field(max_length=_MOST_TENSORS)]

    @model_validator(mode="after")
    def _is_whole(self) -> StepFileIndex:
        names = [one.name for one in self.members]
        tensors = [(one.of, one.version, one.name) for one in self.tensors]
        if len(set(names)) < len(names) or len(set(tensors)) < len(tensors):
            raise ValueError("it names something twice")
        if missing := [one for one in ("run.json", "records/samples") if one not in names]:
            raise ValueError(f"it has no {missing[0]}")
        if not self.first <= self.asked <= self.last:
            raise ValueError(f"it is about step {self.asked}, and has steps {self.first} to {self.last}")
        if self.format == 1 and (
            "records/prompts" in names or any(one.of == "version" for one in self.tensors)
        ):
            raise ValueError("it has format 1, and prompts or weights of versions, which that format has not")
        if len({one.version for one in self.tensors}) > _MOST_VERSIONS:
            raise ValueError(f"it has weights of more than {_MOST_VERSIONS} versions")
        self._check_bases()
        return self

    def _check_bases(self) -> None:
        """Check that a tensor is counted only from one that comes before it."""
        seen: dict[tuple[str, str], StoredTensor] = {}
        for one in self.tensors:
            base = seen.get((one.base, one.minus))
            fits = base is not None and base.shape == one.shape and (base.dtype, one.dtype) in COUNTABLE
            if one.minus and (one.of == one.base or not fits):
                raise ValueError(f"tensor {one.name[:100]} is counted from {one.minus[:100]}, which can't be")
            seen[one.of, one.name] = one

    @property
    def size(self) -> int:
        """Bytes of all that follows the index."""
        return sum(one.size for one in self.members) + sum(one.size for one in self.tensors)


def index_bytes(index: StepFileIndex, ring: KeyRing) -> bytes:
    """Return an index as it is written: canonical JSON with a digest, and a signature if there is a key."""
    return sealed(index.model_dump(mode="json"), ring, _KIND)


def read_index(raw: bytes, where: str, ring: KeyRing) -> StepFileIndex:
    """Parse and check an index. Raises StepFileError, or KeysError if no trusted key has signed it."""
    try:
        said = json.loads(raw)
        if not isinstance(said, dict):
            raise ValueError("its index is no JSON object")
        if (form := said.get("format")) not in _READ:
            raise StepFileError(
                f"{where} has format {str(form)[:20]}; this version of StreamRL reads formats 1 to "
                f"{STEP_FILE_FORMAT}. Its maker was StreamRL {str(said.get('streamrl'))[:40]}: open it "
                "with that version"
            )
        if canonical_json(said) != raw:
            raise ValueError("its index is not as StreamRL writes one")
        unseal(said, ring, where, _KIND)
        return StepFileIndex.model_validate(said)
    except (ValidationError, ValueError, RecursionError) as error:
        raise StepFileError(f"{where} is not a usable step file: {str(error)[:500]}") from error

"""Patches turn weights that a process holds into newer ones: changed elements of each tensor, or all.

positions · values · positions · values · … · index of the tensors (msgpack) · length of the index

A patch comes from comparing bits, so it does not matter which path the weights came by. A patch stays on its
machine, is made and used at memory's speed, and need not be small.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from infra.weights.arrays import Array
from infra.weights.bits import Bits, Model, kind_of, size_of
from infra.weights.weights_error import WeightsError

_SPARSE = 8  # where more than one in so many elements differs, the whole tensor is as cheap
_STEP = 1 << 20  # elements that are compared at once
_NARROW = 1 << 31  # elements: in a tensor of no more, 4 bytes hold a position
_ALIGNED = 8
_LENGTH = struct.Struct("<Q")


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    changed: int | None  # changed elements; None: the whole tensor is in the file
    at: int  # byte of the file where it begins


class _Index(msgspec.Struct, array_like=True, frozen=True):
    since: str | None
    root: str
    entries: list[_Entry]


@dataclass(frozen=True)
class TensorPatch:
    """The new values of a tensor: at some positions, or everywhere."""

    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    positions: Array | None  # in the flat tensor; None: everywhere
    values: Array

    def apply(self, data: Array) -> None:
        """Write the new values over the old ones in a flat tensor."""
        data[... if self.positions is None else self.positions] = self.values


@dataclass(frozen=True)
class Patch:
    """The changes that turn weights with root `since` into weights with root `root`."""

    since: str | None  # None: any weights
    root: str
    parts: Mapping[str, TensorPatch]  # of the tensors that differ
    file: Path | None = None  # that it was read from, for other processes

    def apply(self, model: dict[str, Bits]) -> None:
        """Turn a model into the newer one, in place. Tensors that it lacks are added."""
        for name, part in self.parts.items():
            if part.positions is None and name not in model:
                model[name] = Bits(part.dtype, part.shape, np.empty_like(part.values))
            part.apply(model[name].data)


class PatchFile:
    """A patch in a file in memory that has no name: nothing is left behind, whichever process is killed."""

    def __init__(self, old: Model, new: Model, *, since: str | None, root: str) -> None:
        """`old`: the model with root `since`. Tensors that it lacks are written whole."""
        self._memory = os.memfd_create("patch")
        weakref.finalize(self, os.close, self._memory)
        with open(self._memory, "wb", closefd=False) as file:
            entries = [
                entry for name, bits in new.items() if (entry := _put(file, name, old.get(name), bits))
            ]
            index = msgspec.msgpack.encode(_Index(since, root, entries))
            file.write(index + _LENGTH.pack(len(index)))

    @property
    def path(self) -> Path:
        """The path by which other processes open the file, as long as this object lives."""
        return Path(f"/proc/{os.getpid()}/fd/{self._memory}")

    def read(self) -> Patch:
        """Return the patch in the file."""
        return read_patch(self.path)


def read_patch(path: Path) -> Patch:
    """Return the patch in a file, mapped into memory. Raises WeightsError if the file is damaged."""
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        end = len(data) - _LENGTH.size
        begin = end - _LENGTH.unpack(data[end:])[0]
        index = msgspec.msgpack.decode(data[begin:end], type=_Index)
        parts = {entry.tensor: _part(entry, data[:begin]) for entry in index.entries}
    except (OSError, struct.error, ValueError, KeyError) as error:
        raise WeightsError(f"{path} can't be read as a patch of weights: {error!r}") from error
    return Patch(index.since, index.root, parts, path)


def patch_pieces(patch: Patch) -> Iterator[bytes | memoryview]:
    """Yield, piece by piece, a file in which `read_patch` finds this patch: it may go to another machine."""
    entries, at = [], 0
    for name, part in patch.parts.items():
        changed = None if part.positions is None else part.positions.size
        entries.append(_Entry(name, part.dtype, part.shape, changed, at))
        for data in (part.values,) if part.positions is None else (part.positions, part.values):
            yield data.view(np.uint8).data
            yield bytes(_padded(data.nbytes) - data.nbytes)
            at += _padded(data.nbytes)
    index = msgspec.msgpack.encode(_Index(patch.since, patch.root, entries))
    yield index + _LENGTH.pack(len(index))


def _part(entry: _Entry, body: memoryview) -> TensorPatch:
    kind = kind_of(entry.dtype)
    elements = size_of(entry.dtype, entry.shape) * 8 // kind.bits
    if entry.changed is None:
        return TensorPatch(
            entry.dtype, entry.shape, None, np.frombuffer(body, kind.unsigned, elements, entry.at)
        )
    positions = np.frombuffer(body, _positions(elements), entry.changed, entry.at)
    values = np.frombuffer(body, kind.unsigned, entry.changed, entry.at + _padded(positions.nbytes))
    return TensorPatch(entry.dtype, entry.shape, positions, values)


def _put(file: BinaryIO, name: str, old: Bits | None, new: Bits) -> _Entry | None:
    """Write what changes in a tensor. Returns None if nothing does."""
    positions = (
        None if old is None or (old.dtype, old.shape) != (new.dtype, new.shape) else _changed(old, new)
    )
    at = file.tell()
    if positions is None:
        _write(file, new.data)
        return _Entry(name, new.dtype, new.shape, None, at)
    if not positions.size:
        return None
    _write(file, positions)
    _write(file, new.data[positions])
    return _Entry(name, new.dtype, new.shape, positions.size, at)


def _changed(old: Bits, new: Bits) -> Array | None:
    """Return the positions that differ; None if there are so many that the whole tensor is as cheap."""
    size, found, count = new.data.size, [np.zeros(0, _positions(new.data.size))], 0
    for start in range(0, size, _STEP):
        part = slice(start, start + _STEP)
        places = np.flatnonzero(old.data[part] != new.data[part])
        count += places.size
        if count * _SPARSE > size:
            return None
        found.append((places + start).astype(found[0].dtype))
    return np.concatenate(found)


def _write(file: BinaryIO, data: Array) -> None:
    file.write(data.view(np.uint8).data)
    file.write(bytes(_padded(data.nbytes) - data.nbytes))


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _positions(elements: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if elements <= _NARROW else np.int64)

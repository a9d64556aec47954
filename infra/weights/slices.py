"""The slices of tensors that the ranks of one engine hold, as vLLM's tensor parallelism divides them.

rows      q, k and v by heads; gate and up; embedding and head by the vocabulary, padded
columns   o and down: each rank computes a part of a sum, and the ranks add up
whole     all else, such as norms and the biases of o and down

A rank of a model that has fewer heads of k and v than ranks holds the same heads as its neighbours.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infra.weights.arrays import Array
from infra.weights.bits import Bits, Model
from infra.weights.digest import digest_of
from infra.weights.eight_bits import SCALE
from infra.weights.patch import Patch, TensorPatch
from infra.weights.weights_error import WeightsError

VOCABULARY_PADDING = 64  # vLLM pads the rows of embedding and head to a multiple of it

_LARGEST_CONFIG = 8 << 20  # bytes
_QUERIES, _KEYS = {"q_proj"}, {"k_proj", "v_proj"}
_ROWS, _COLUMNS = {"gate_proj", "up_proj"}, {"o_proj", "down_proj"}
_VOCABULARY = {"embed_tokens", "lm_head"}


@dataclass(frozen=True)
class Slice:
    """Some rows (axis 0) or columns (axis 1) of a tensor."""

    axis: int
    begin: int
    end: int

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the slice of a tensor."""
        shape = list(whole)
        shape[self.axis] = self.end - self.begin
        return tuple(shape)

    def values(self, flat: Array, shape: Sequence[int]) -> Array:
        """Return the slice of a flat tensor, flat; rows are not copied."""
        row = math.prod(shape[1:])
        if self.axis == 0:
            rows: Array = flat[self.begin * row : self.end * row]
            return rows
        return np.ascontiguousarray(flat.reshape(shape)[:, self.begin : self.end]).reshape(-1)

    def patch(self, part: TensorPatch) -> TensorPatch:
        """Return what a patch of the whole tensor means for the slice."""
        shape, positions = self.shape(part.shape), part.positions
        if positions is None:
            return TensorPatch(part.dtype, shape, None, self.values(part.values, part.shape))
        row = math.prod(part.shape[1:])
        if self.axis == 0:  # positions ascend
            first = bisect_left(positions, self.begin * row)
            last = bisect_left(positions, self.end * row)
            mine = positions[first:last] - positions.dtype.type(self.begin * row if last > first else 0)
            return TensorPatch(part.dtype, shape, mine, part.values[first:last])
        rows, columns = np.divmod(positions, positions.dtype.type(row))
        inside = np.flatnonzero((columns >= self.begin) & (columns < self.end))
        width = positions.dtype.type(self.end - self.begin)
        mine = rows[inside] * width + (columns[inside] - positions.dtype.type(self.begin))
        return TensorPatch(part.dtype, shape, mine, part.values[inside])


@dataclass(frozen=True)
class Slicing:
    """How a model is divided among the ranks of an engine."""

    ranks: int
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, folder: Path, ranks: int) -> Slicing:
        """Return the slicing of the model in a folder. Raises WeightsError if its config does not say it."""
        file = folder / "config.json"
        try:
            with file.open("rb") as opened:
                config = json.loads(opened.read(_LARGEST_CONFIG))
            heads = _count(config["num_attention_heads"])
            kv_heads = config.get("num_key_value_heads")
            return cls(ranks, heads, heads if kv_heads is None else _count(kv_heads))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(
                f"{file} does not say how many attention heads the model has ({error!r}), so its tensors "
                "can't be divided among ranks"[:1000]
            ) from None

    @classmethod
    def for_engine(cls, folder: Path, ranks: int) -> Slicing | None:
        """Like `of`; None for an engine of one rank, which holds all tensors whole."""
        return cls.of(folder, ranks) if ranks > 1 else None

    def problems(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
        """Yield why a model with tensors of these shapes can't be divided among so many ranks."""
        if self.heads % self.ranks:
            yield f"its {self.heads} attention heads can't be divided among {self.ranks} ranks"
        if self.kv_heads % self.ranks and self.ranks % self.kv_heads:
            yield (
                f"its {self.kv_heads} heads of keys and values can neither be divided among {self.ranks} "
                "ranks nor be given to equally many ranks each"
            )
        if VOCABULARY_PADDING % self.ranks:
            yield (
                f"vocabularies are padded to a multiple of {VOCABULARY_PADDING} rows, which can't be divided "
                f"among {self.ranks} ranks"
            )
        if self.heads % self.ranks == 0 and (wrong := self._undivided(shapes)):
            yield wrong

    def slice(self, name: str, shape: Sequence[int], rank: int) -> Slice | None:
        """Return the slice of a tensor that a rank holds; None if it holds all.

        Raises WeightsError if nobody knows how ranks divide such a tensor.
        """
        module, _, leaf = name.rpartition(".")
        layer = module.rpartition(".")[2]
        if len(shape) > 1 and (".experts." in name or len(shape) > 2 or leaf != "weight"):
            raise self._unknown(name)
        if leaf not in ("weight", "bias", SCALE):  # scales of rows are divided as rows are
            return None  # such as scales of channels; ranks look what vLLM holds of them
        if layer in _QUERIES:
            return self._even(name, shape, 0, self.heads, rank)
        if layer in _KEYS:
            return self._even(name, shape, 0, self.kv_heads, rank)
        if layer in _ROWS:
            return self._even(name, shape, 0, self.ranks, rank)
        if layer in _COLUMNS:
            return self._even(name, shape, 1, self.ranks, rank) if len(shape) == 2 else None
        if layer in _VOCABULARY:
            each = -(-shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING // self.ranks
            return Slice(0, min(rank * each, shape[0]), min((rank + 1) * each, shape[0]))
        if len(shape) == 1:
            return None
        raise self._unknown(name)

    def shapes(self, shapes: Mapping[str, Sequence[int]], rank: int) -> dict[str, Sequence[int]]:
        """Return the shapes of what a rank holds of some tensors."""
        return {
            name: shape if (mine := self.slice(name, shape, rank)) is None else mine.shape(shape)
            for name, shape in shapes.items()
        }

    def patch(self, patch: Patch, rank: int) -> Patch:
        """Return what a patch means for a rank."""
        parts = {}
        for name, part in patch.parts.items():
            mine = self.slice(name, part.shape, rank)
            parts[name] = part if mine is None else mine.patch(part)
        return Patch(patch.since, patch.root, parts)

    def _even(self, name: str, shape: Sequence[int], axis: int, parts: int, rank: int) -> Slice:
        """Return a rank's slice of `parts` equal parts. If there are fewer, several ranks have the same."""
        if shape[axis] % parts or (parts % self.ranks and self.ranks % parts):
            raise WeightsError(
                f"tensor {name} {list(shape)} can't be divided among {self.ranks} ranks of an engine"
            )
        size, each = shape[axis] // parts, max(1, parts // self.ranks)
        first = rank * each if parts >= self.ranks else rank // (self.ranks // parts)
        return Slice(axis, first * size, (first + each) * size)

    def _undivided(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Return the first tensor that can't be divided, in words; empty if there is none."""
        try:
            for name, shape in shapes.items():
                self.slice(name, shape, 0)
        except WeightsError as error:
            return str(error)
        return ""

    def _unknown(self, name: str) -> WeightsError:
        kind = "mixtures of experts run on one rank" if ".experts." in name else "it is no layer known here"
        return WeightsError(
            f"tensor {name} can't be divided among {self.ranks} ranks of an engine: {kind}. Set "
            "generator.tensor_parallel: 1"
        )


class SliceDigests:
    """Hashes the slices that the ranks of an engine must hold, from whole tensors.

    Slices of a tensor that has not changed since the last call are not hashed again.
    """

    def __init__(self, slicing: Slicing | None) -> None:
        """`slicing`: None for an engine that holds whole tensors."""
        self._slicing = slicing
        self._known: dict[str, tuple[str, list[str]]] = {}  # by tensor: its own digest, and those by rank

    def of(self, model: Model, digests: Mapping[str, str]) -> dict[str, str]:
        """Return the digests of all slices of a model with verified `digests`, by `slice_name`."""
        if self._slicing is None:
            return dict(digests)
        found: dict[str, str] = {}
        for name, bits in model.items():
            if name not in self._known or self._known[name][0] != digests[name]:
                by_rank = _by_rank(self._slicing, name, bits, digests[name])
                self._known[name] = digests[name], list(by_rank)
            for rank, digest in enumerate(self._known[name][1]):
                found[slice_name(name, rank)] = digest
        return found


def _by_rank(slicing: Slicing, name: str, bits: Bits, whole: str) -> Iterator[str]:
    hashed: dict[Slice | None, str] = {None: whole}
    for rank in range(slicing.ranks):
        mine = slicing.slice(name, bits.shape, rank)
        if mine is not None and mine not in hashed:
            values = mine.values(bits.data, bits.shape)
            hashed[mine] = digest_of(Bits(bits.dtype, mine.shape(bits.shape), values))
        yield hashed[mine]


def slice_name(tensor: str, rank: int) -> str:
    """Return the name of a rank's slice of a tensor in digests and errors."""
    return f"{tensor} on rank {rank}"


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is no number of heads")
    return value

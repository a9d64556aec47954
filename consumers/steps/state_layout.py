"""The layout of a state in parts: where the elements of each tensor lie, and whether all of them do."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from consumers.learners.state_pieces import piece_of
from infra.weights.manifest import Tensor


@dataclass(frozen=True, order=True)
class StoredPiece:
    """Elements of a tensor in the file of one part."""

    first: int
    end: int
    part: int
    name: str  # of the piece in that file


@dataclass(frozen=True)
class TensorLayout:
    """All pieces of a tensor, in order. A whole tensor is one piece that has the tensor's own name."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[StoredPiece]


def all_tensors(parts: Sequence[Mapping[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the tensors in the files of all parts, with their names."""
    return [item for part in parts for item in part.items()]


def layout_of(
    shapes: Mapping[str, tuple[int, ...]], parts: Sequence[Mapping[str, Tensor]]
) -> dict[str, TensorLayout]:
    """Return the layout of each tensor. Raise ValueError unless its pieces have each element once."""
    found, whole = defaultdict[str, list[StoredPiece]](list), dict[str, TensorLayout]()
    types = dict[str, str]()
    for number, part in enumerate(parts):
        for name, tensor in part.items():
            of_piece = piece_of(name)
            if of_piece is None or of_piece[0] not in shapes:
                if name in whole or name in shapes:
                    raise ValueError(f"tensor {name} is there twice")
                elements = math.prod(tensor.shape)
                whole[name] = TensorLayout(
                    tensor.dtype, tensor.shape, [StoredPiece(0, elements, number, name)]
                )
                continue
            tensor_name, first, end = of_piece
            if tensor.shape != (end - first,):
                raise ValueError(f"piece {name} has shape {list(tensor.shape)}")
            if types.setdefault(tensor_name, tensor.dtype) != tensor.dtype:
                raise ValueError(f"pieces of {tensor_name} have several types")
            found[tensor_name].append(StoredPiece(first, end, number, name))
    divided = {}
    for name, shape in shapes.items():
        pieces, at = sorted(found[name]), 0
        for piece in pieces:
            if piece.first != at:
                raise ValueError(f"the pieces of {name} have element {min(piece.first, at)} not once")
            at = piece.end
        if at != math.prod(shape):
            raise ValueError(f"the pieces of {name} have {at} elements instead of {math.prod(shape)}")
        divided[name] = TensorLayout(types.get(name, "F32"), shape, pieces)
    return divided | whole

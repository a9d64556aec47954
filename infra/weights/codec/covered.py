"""Records which elements of a model a path has named: each only once, so that paths cost no more than
models."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from infra.weights.bits import Model
from infra.weights.codec.groups import BANDED, ROWED, SAME, WHOLE, Head, Span
from infra.weights.codec.tiles import LONGER, PARTS, RUN, TILE
from infra.weights.weights_error import WeightsError

_HASH = 8  # bytes of a tile's hash
# Most bytes of a group's elements: publishers end a group with the tile that fills a run.
_LARGEST = LONGER * RUN + 8 * TILE


class Covered:
    """Spans of tensors that do not overlap."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[int, int]]] = {}

    def add(self, span: Span, what: str) -> None:
        """Add a span. Raises WeightsError if it overlaps one that was added before."""
        held, begin, end = self._spans.setdefault(span.tensor, []), span.start, span.start + span.count
        at = bisect.bisect(held, (begin, end))
        if (at and held[at - 1][1] > begin) or (at < len(held) and held[at][0] < end):
            raise WeightsError(f"{what} is damaged: it names {span.tensor}[{begin}:{end}] more than once")
        held.insert(at, (begin, end))


def check_heads(heads: Sequence[tuple[Head, memoryview]], model: Model, what: str, covered: Covered) -> None:
    """Raise unless a chunk's groups are of a model, within limits, and name no element a second time."""
    for head, body in heads:
        _check(head, len(body), model, what)
        for span in head.spans:
            covered.add(span, what)


def _check(head: Head, size: int, model: Model, what: str) -> None:
    if head.mode not in (SAME, BANDED, WHOLE, ROWED) or head.parts not in (1, PARTS) or not head.spans:
        raise WeightsError(f"{what} is damaged: it holds an impossible group")
    elements = tiles = 0
    for span in head.spans:
        bits, end = model.get(span.tensor), span.start + span.count
        if bits is None or bits.dtype != head.dtype or not 0 <= span.start < end <= bits.size:
            raise WeightsError(
                f"{what} is for another model: this one has no {head.dtype} {span.tensor}[{span.start}:{end}]"
            )
        elements += span.count * bits.kind.bits // 8
        tiles += -(-span.count // (TILE // head.parts))
    if elements > _LARGEST:
        raise WeightsError(
            f"{what} is damaged: it holds a group of {elements} bytes; {_LARGEST} are the most"
        )
    if tiles * _HASH * (1 if head.mode == WHOLE else 2) > size:
        raise WeightsError(f"{what} ends too soon")

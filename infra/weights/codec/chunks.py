"""Chunks: coded groups of tiles, as objects of the store.

magic · length of the head · head (msgpack: the groups' heads) · the groups' bodies
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import msgspec

from infra.weights import spent
from infra.weights.bits import Bits, Model
from infra.weights.codec.covered import Covered, check_heads
from infra.weights.codec.decoding import decode_group
from infra.weights.codec.encoding import encode_run, run_size
from infra.weights.codec.groups import CodedGroup, Head
from infra.weights.codec.tiles import TILE, Tile, tile_runs
from infra.weights.gpu_bits import device_of, lies_on_gpu, own_stream_for
from infra.weights.weights_error import WeightsError, damaged

if TYPE_CHECKING:
    from infra.weights.codec.gpu_encoding import GpuLook

_log = logging.getLogger("streamrl.weights")
CHUNK = 8 << 20  # bytes: a chunk ends with the group that makes it so large
_MAGIC = b"SRWC"
_START = struct.Struct("<4sI")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class _Head(msgspec.Struct, array_like=True, frozen=True):
    format: int
    tile: int
    groups: list[Head]


def encode_model(old: Model | None, new: Model, *, threads: int = 1, size: int = CHUNK) -> Iterator[bytes]:
    """Yield the chunks that make a new model of an old one, or of nothing (None).

    Both have the same tensors. A chunk ends with the group by which it has `size` bytes.
    """
    if old is not None:
        check_alike(old, new)
    held: list[CodedGroup] = []

    look = _look_there(old, new)
    runs = tile_runs(new, run_size(old, new) if look is None else look.run_size)

    def code(run: tuple[str, list[Tile]]) -> list[CodedGroup]:
        with own_stream_for(new):
            if look is None:
                return list(encode_run(*run, old, new))
            try:
                return list(encode_run(*run, old, new, look))
            except look.no_room as error:  # training needs more than before
                _log.warning("the GPU has no room to look for changes, main memory has: %s", error)
                return list(encode_run(*run, old, new))

    for group in itertools.chain.from_iterable(in_threads(code, runs, threads)):
        held.append(group)
        if sum(one.head.size for one in held) >= size:
            yield _chunk(held)
    if held:
        yield _chunk(held)


def _look_there(old: Model | None, new: Model) -> GpuLook | None:
    """Return how to look for changes where the new model lies, if that is a GPU."""
    if not lies_on_gpu(new):
        return None
    from infra.weights.gpu_transfer import settled

    settled(device_of(new))
    if old is None:
        return None
    from infra.weights.codec.gpu_encoding import GpuLook

    return GpuLook(old, new)


def check_alike(old: Model, new: Model) -> None:
    """Raise unless two models have tensors of the same names, types and shapes."""
    for name in sorted({*old, *new}):
        one, other = old.get(name), new.get(name)
        if one is None or other is None:
            raise WeightsError(f"only the {'new' if one is None else 'old'} model has a tensor {name}")
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            raise WeightsError(f"{name} is {_said(one)} in the old model and {_said(other)} in the new one")


def _said(bits: Bits) -> str:
    return f"{bits.dtype} {list(bits.shape)}"


def _chunk(held: list[CodedGroup]) -> bytes:
    """Join all held groups into a chunk, and clear the list."""
    head = msgspec.msgpack.encode(_Head(1, TILE, [group.head for group in held]))
    body = (part for group in held for part in group.body)
    chunk = b"".join([_START.pack(_MAGIC, len(head)), head, *body])
    held.clear()
    return chunk


def heads_of(chunk: bytes | memoryview, what: str) -> list[tuple[Head, memoryview]]:
    """Return head and body of each group in a chunk. Raises WeightsError if the chunk is damaged."""
    view = memoryview(chunk)
    try:
        magic, size = _START.unpack_from(view)
        if magic != _MAGIC:
            raise WeightsError(f"{what} is no chunk of weights: it begins with {bytes(magic)!r}")
        at = _START.size + size
        head = msgspec.msgpack.decode(view[_START.size : at], type=_Head)
    except (struct.error, ValueError, RecursionError, MemoryError) as error:  # msgspec raises ValueErrors
        raise WeightsError(f"{what} is damaged: {error}") from error
    if (head.format, head.tile) != (1, TILE):
        raise WeightsError(
            f"{what} has format {head.format} with tiles of {head.tile}; this version of StreamRL reads "
            f"format 1 with tiles of {TILE}"
        )
    found = []
    for group in head.groups:
        if group.size < 0 or at + group.size > len(view):
            raise WeightsError(f"{what} ends too soon")
        found.append((group, view[at : at + group.size]))
        at += group.size
    return found


def decode_chunk(
    chunk: bytes | memoryview, model: Model, what: str, *, threads: int = 1, covered: Covered | None = None
) -> list[Tile]:
    """Apply a chunk to a model in main memory, in place. Returns the tiles that changed.

    `covered`: the elements that earlier chunks of the path have named; `what` names the chunk in errors.
    Raises StaleTile if the chunk is for other weights. Tiles that were changed before stay changed: with the
    right model, or after a crash, decoding the chunk again goes on from there.
    """

    def apply(group: tuple[Head, memoryview]) -> list[Tile]:
        return list(decode_group(*group, model, what))

    with damaged(what):
        heads = heads_of(chunk, what)
        check_heads(heads, model, what, Covered() if covered is None else covered)
        return [tile for tiles in in_threads(apply, heads, threads) for tile in tiles]


def in_threads(do: Callable[[_Item], _Result], items: Iterable[_Item], threads: int) -> Iterator[_Result]:
    """Yield results in the order of the items, with about `threads` items under way at a time."""
    if threads == 1:
        yield from map(spent.counted()(do), items)
        return
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[_Result]] = deque()
        try:
            for item in items:
                ahead.append(pool.submit(spent.counted()(do), item))
                if len(ahead) > threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

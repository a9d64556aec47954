"""A checkpoint's state in the store: a safetensors file that is written and read piece by piece.

The manifest alone says where each tensor lies, and has a hash of each: the file's own head is not trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from consumers.learners.collective import Outline
from consumers.learners.snapshot import PIECE, StateSnapshot
from consumers.steps.checkpoint_manifest import Damaged, FirstManifest
from infra.stores.store import Missing, Store
from infra.weights.bits import NAMES, file_head
from infra.weights.codec.chunks import in_threads
from infra.weights.digest import TensorHash
from infra.weights.manifest import Tensor

_UNDER_WAY = 4  # pieces that are read at once


def write(
    store: Store, key: str, state: StateSnapshot, moved: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """Write a state to the store; return dtype, shape and digest of its tensors.

    `moved` is called whenever the store has taken a piece.
    """
    hashes = {name: TensorHash(*outline) for name, outline in state.outlines.items()}

    def parts() -> Iterator[bytes | memoryview]:
        yield state.head
        for name, piece in state.pieces():
            hashes[name].update(piece)
            yield piece
            moved()

    store.put_parts(key, parts(), len(state.head) + state.size)
    return {
        name: Tensor(dtype=dtype, shape=shape, digest=hashes[name].hexdigest())
        for name, (dtype, shape) in state.outlines.items()
    }


class StoredState(Mapping[str, torch.Tensor]):
    """The tensors of a stored state. Each is read when it is asked for, and checked against the manifest."""

    fresh = True  # the caller gets the only copy of a tensor

    def __init__(self, store: Store, key: str, tensors: Mapping[str, Tensor]) -> None:
        """`tensors`: as the manifest has them."""
        self._store, self._key, self._tensors = store, key, tensors
        head, names = file_head({name: (one.dtype, one.shape) for name, one in tensors.items()})
        self._at, at = {}, len(head)
        for name in names:
            self._at[name] = at
            at += tensors[name].size
        self._where = f"{store.url}/{key}"
        self._look(head, at)

    def _look(self, head: bytes, size: int) -> None:
        """Raise Damaged if the file's size or head does not fit the manifest, before memory is taken."""
        try:
            found = self._store.size(self._key)
            if found != size:
                raise self._damaged(f"it has {found} bytes instead of {size}")
            if self._store.get_part(self._key, 0, len(head)) != head:
                raise self._damaged("its header differs")
        except Missing as error:
            raise Damaged(f"{self._where} is not there, though its manifest is") from error

    @property
    def outlines(self) -> list[Outline]:
        """Name, dtype and shape of each tensor."""
        return [(name, NAMES[one.dtype][0], list(one.shape)) for name, one in self._tensors.items()]

    def verify(self) -> None:
        """Read all tensors, keep none, and raise Damaged if a bit is wrong."""
        for name, tensor in self._tensors.items():
            hashed = TensorHash(tensor.dtype, tensor.shape)
            for _, piece in self._pieces(name):
                hashed.update(piece)
            self._check(name, hashed)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        found = torch.empty(tensor.shape, dtype=getattr(torch, NAMES[tensor.dtype][0]))
        flat, hashed = found.view(-1).view(torch.uint8).numpy(), TensorHash(tensor.dtype, tensor.shape)
        for at, piece in self._pieces(name):
            hashed.update(piece)
            flat.data[at : at + len(piece)] = piece
        self._check(name, hashed)
        return found

    def _pieces(self, name: str) -> Iterator[tuple[int, bytes]]:
        begin, size = self._at[name], self._tensors[name].size
        places = range(0, size, PIECE)
        threads = min(_UNDER_WAY, max(1, len(places)))

        def read(at: int) -> bytes:
            return self._store.get_part(self._key, begin + at, min(PIECE, size - at))

        try:
            yield from zip(places, in_threads(read, places, threads), strict=True)
        except Missing as error:
            raise Damaged(f"{self._where} is not there, though its manifest is") from error

    def _check(self, name: str, hashed: TensorHash) -> None:
        if hashed.hexdigest() != self._tensors[name].digest:
            raise self._damaged(f"tensor {name} differs")

    def _damaged(self, what: str) -> Damaged:
        return Damaged(f"{self._where} has other bits than its manifest says: {what}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def read_first(store: Store, manifest: FirstManifest) -> dict[str, torch.Tensor]:
    """Read a state of format 1, which can be verified only as a whole."""
    where = f"{store.url}/{manifest.state}"
    try:
        data = store.get(manifest.state)
    except Missing as error:
        raise Damaged(f"{where} is not there, though its manifest is") from error
    if blake3(data).hexdigest() != manifest.digest:
        raise Damaged(f"{where} has other bits than its manifest says")
    try:
        found: dict[str, torch.Tensor] = load_safetensors(data)
    except SafetensorError as error:
        raise Damaged(f"{where} is damaged: {error}") from error
    return found

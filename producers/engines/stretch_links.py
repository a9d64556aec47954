"""Sends what one stretch of layers has computed to the next, and the logits of the last one to all.

rank 0 ── hidden states of a step ──► rank 1        layers
   ▲                                    │
   └────────────── logits ──────────────┘           then all ranks draw the same tokens

vLLM's own way pickles names and shapes in each step. Here they are a few numbers in msgpack, of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from producers.engines.engine import EngineError

_ROOM = 1024  # bytes for names, dtypes and shapes, with their length
_LENGTH = 2  # bytes of that
_DTYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.bfloat16, torch.float16)}
_Said = list[tuple[str, str, list[int]]]  # name, dtype and shape of each tensor
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Said).decode
_Tensors = Mapping[str, torch.Tensor]


class StretchLinks:
    """The connections between ranks that hold the stretches of layers one after the other."""

    def __init__(self, group: Any) -> None:
        """`group`: vLLM's coordinator of these ranks."""
        self._group = group

    def use(self) -> None:
        """Let vLLM send in this way."""
        group = self._group
        group.send_tensor_dict = self.send
        group.irecv_tensor_dict = lambda *_, **__: (self.receive(), [], [])
        group.broadcast_tensor_dict = self.share

    def send(self, tensors: _Tensors, *_: Any, **__: Any) -> None:
        """Send tensors to the next stretch."""
        to = self._group.ranks[self._group.rank_in_group + 1]
        dist.send(_header(tensors), to, group=self._group.cpu_group)
        for tensor in tensors.values():
            dist.send(tensor.contiguous(), to, group=self._group.device_group)

    def receive(self) -> dict[str, torch.Tensor]:
        """Wait for the tensors of the stretch before."""
        of = self._group.ranks[self._group.rank_in_group - 1]
        header = torch.empty(_ROOM, dtype=torch.uint8)
        dist.recv(header, of, group=self._group.cpu_group)
        return self._filled(header, lambda tensor: dist.recv(tensor, of, group=self._group.device_group))

    def share(self, tensors: _Tensors, src: int, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        """Send tensors of one rank to all, which call this, too."""
        of = self._group.ranks[src]
        owns = self._group.rank_in_group == src
        header = _header(tensors) if owns else torch.empty(_ROOM, dtype=torch.uint8)
        dist.broadcast(header, of, group=self._group.cpu_group)
        give = lambda tensor: dist.broadcast(tensor, of, group=self._group.device_group)  # noqa: E731
        if not owns:
            return self._filled(header, give)
        for tensor in tensors.values():
            give(tensor)
        return dict(tensors)

    def _filled(
        self, header: torch.Tensor, fill: Callable[[torch.Tensor], object]
    ) -> dict[str, torch.Tensor]:
        found = {}
        for name, dtype, shape in _said_in(header):
            found[name] = torch.empty(shape, dtype=_DTYPES[dtype], device=self._group.device)
            fill(found[name])
        return found


def _header(tensors: _Tensors) -> torch.Tensor:
    """Return names, dtypes and shapes of tensors, in as many bytes as always."""
    said: _Said = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in tensors.items()
    ]
    if len(data := _encode(said)) > _ROOM - _LENGTH:
        raise EngineError(f"{len(said)} tensors between two stretches of layers are more than have room")
    framed = len(data).to_bytes(_LENGTH, "little") + data
    return torch.frombuffer(bytearray(framed.ljust(_ROOM, b"\0")), dtype=torch.uint8)


def _said_in(header: torch.Tensor) -> _Said:
    data = header.numpy().tobytes()
    size = int.from_bytes(data[:_LENGTH], "little")
    return _decode(data[_LENGTH : _LENGTH + size])

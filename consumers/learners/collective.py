"""What the ranks of a trainer do together, over torch.distributed; a process that is alone does nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from infra import choices
from infra.errors import Explained

_HOST = "127.0.0.1"

# What a tensor is, for those who do not have it: name, dtype, shape.
Outline = tuple[str, str, list[int]]


class RanksError(Explained):
    """Ranks can't work together; the message names them and says what to do."""


def meeting_place(ranks: int) -> dist.TCPStore:
    """Of rank 0: where the others find it, on a port of this machine alone that was free.

    Left to itself the store listens on all interfaces, whatever host it is given: it gets a socket.
    """
    listening = socket.create_server((_HOST, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        _HOST, port, ranks, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def join_ranks(number: int, ranks: int, place: dist.TCPStore | int, deadline_s: float) -> None:
    """Become one of the ranks; returns when all have. `place`: of rank 0, or its port."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["LOCAL_RANK"] = str(number)  # DeepSpeed asks
    backend = "gloo"
    if choices.cuda():
        if ranks > torch.cuda.device_count():
            raise RanksError(
                f"trainer.ranks is {ranks} and this machine has {torch.cuda.device_count()} GPUs: each rank "
                "needs one"
            )
        torch.cuda.set_device(number)
        backend = "nccl"
    deadline = timedelta(seconds=deadline_s)
    if isinstance(place, int):
        place = dist.TCPStore(_HOST, place, ranks, is_master=False, timeout=deadline)
    dist.init_process_group(backend, store=place, rank=number, world_size=ranks, timeout=deadline)


def leave() -> None:
    """Be alone again."""
    if joined():
        dist.destroy_process_group()


def joined() -> bool:
    """Whether this process is one of several, or alone in the way of several."""
    return bool(dist.is_initialized())


def rank_number() -> int:
    """This process's number."""
    return int(dist.get_rank()) if joined() else 0


def ranks() -> int:
    """How many there are."""
    return int(dist.get_world_size()) if joined() else 1


def device() -> torch.device:
    """What this rank computes on."""
    if choices.cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def add_up(tensor: torch.Tensor) -> None:
    """Each rank's tensor becomes the sum over all ranks."""
    if ranks() > 1:
        dist.all_reduce(tensor)


@runtime_checkable
class Told(Protocol):
    """Tensors of which is known what they are before they are read."""

    @property
    def outlines(self) -> list[Outline]:
        """Of all."""


class Withheld(Exception):
    """Rank 0 could not read a tensor that the others were to get from it."""


class Shared(Mapping[str, torch.Tensor]):
    """Tensors that rank 0 has. Each goes to the others when it is asked for, so that none holds them all.

    All ranks ask for the same tensors in the same order. If rank 0 can't read one, all get an error.
    """

    def __init__(self, outlines: list[Outline], held: Mapping[str, torch.Tensor] | None = None) -> None:
        self._outlines = {name: (dtype, shape) for name, dtype, shape in outlines}
        self._held = held

    @staticmethod
    def outlines_of(tensors: Mapping[str, torch.Tensor]) -> list[Outline]:
        """What rank 0 tells the others of its tensors."""
        if isinstance(tensors, Told):
            return tensors.outlines
        return [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in tensors.items()
        ]

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape = self._outlines[name]
        there = torch.zeros(1, device=device())
        if self._held is not None:
            try:
                tensor = self._held[name].to(device())
                there += 1
            finally:
                dist.broadcast(there, src=0)
        else:
            dist.broadcast(there, src=0)
            if not there:
                raise Withheld(name)
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device())
        dist.broadcast(tensor, src=0)
        return tensor.cpu()

    def __iter__(self) -> Iterator[str]:
        return iter(self._outlines)

    def __len__(self) -> int:
        return len(self._outlines)

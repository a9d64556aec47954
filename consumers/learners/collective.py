"""Operations of a trainer's ranks over torch.distributed; in a process that is alone they do nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from infra import choices
from infra.ranks.rank_addresses import RanksError, interface_of
from infra.stack.ports import LOOPBACK

# Name, dtype and shape of a tensor, for ranks that do not have it.
Outline = tuple[str, str, list[int]]
_NUMBERS = ("LOCAL_RANK", "RANK", "WORLD_SIZE")  # variables that DeepSpeed reads


class Deadlines(Protocol):
    """How long ranks wait for each other, in seconds; see the run file's section `deadlines`."""

    @property
    def start_s(self) -> float:
        """For all to have joined."""

    @property
    def progress_s(self) -> float:
        """For one that works."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a rank among all ranks, and on its machine."""

    number: int
    ranks: int
    local: int = 0  # number among the ranks of its machine, and of its GPU there
    address: str = LOOPBACK  # of its machine, at which other ranks reach it


def join_ranks(seat: Seat, place: dist.TCPStore | tuple[str, int], deadlines: Deadlines) -> None:
    """Join the process group; return when all ranks have joined.

    `place`: the store of rank 0, or its address and port on other ranks. Raises RanksError if there are too
    few GPUs.
    """
    interface = interface_of(seat.address)
    os.environ |= {
        "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}",
        # A launcher may have numbered its processes otherwise.
        **dict(zip(_NUMBERS, map(str, (seat.local, seat.number, seat.ranks)), strict=True)),
    }  # fmt: skip
    backend = "gloo"
    if choices.cuda():
        if seat.local >= torch.cuda.device_count():
            raise RanksError(
                f"this machine has {torch.cuda.device_count()} GPUs, and at least {seat.local + 1} of the "
                f"{seat.ranks} ranks: each needs one"
            )
        torch.cuda.set_device(seat.local)
        backend = "nccl"
    if isinstance(place, tuple):
        start = timedelta(seconds=deadlines.start_s)
        place = dist.TCPStore(*place, seat.ranks, is_master=False, timeout=start)
    # Ranks also wait for each other in all that they compute later: one may write to the store meanwhile.
    longest = timedelta(seconds=deadlines.start_s + deadlines.progress_s)
    dist.init_process_group(backend, store=place, rank=seat.number, world_size=seat.ranks, timeout=longest)


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if joined():
        dist.destroy_process_group()
    for name in _NUMBERS:  # a process that is started from here is no rank, and must not take itself for one
        os.environ.pop(name, None)


def joined() -> bool:
    """Return whether this process is in a process group, be it of one rank only."""
    return bool(dist.is_initialized())


def rank_number() -> int:
    """Return the number of this rank; 0 for a process that is alone."""
    return int(dist.get_rank()) if joined() else 0


def ranks() -> int:
    """Return the number of ranks; 1 for a process that is alone."""
    return int(dist.get_world_size()) if joined() else 1


def device() -> torch.device:
    """Return the device that this rank computes on."""
    if choices.cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def add_up(tensor: torch.Tensor) -> None:
    """Replace each rank's tensor by the sum over all ranks."""
    if ranks() > 1:
        dist.all_reduce(tensor)


def maximum(tensor: torch.Tensor) -> None:
    """Replace each rank's tensor by the largest elements among all ranks."""
    if ranks() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


def brought(rows: torch.Tensor, most: int, count: int) -> torch.Tensor | None:
    """Return the rows of all ranks on rank 0, and None on the others.

    `most`: rows of a rank that has most. `count`: rows of all ranks; the last ranks may have fewer than
    others.
    """
    if ranks() == 1:
        return rows
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    if rank_number() != 0:
        dist.gather(padded, dst=0)
        return None
    parts = [torch.empty_like(padded) for _ in range(ranks())]
    dist.gather(padded, parts, dst=0)
    return torch.cat(parts)[:count]


@runtime_checkable
class Told(Protocol):
    """Tensors whose names, dtypes and shapes are known before they are read."""

    @property
    def outlines(self) -> list[Outline]:
        """Name, dtype and shape of each tensor."""


class Withheld(Exception):
    """Raised on the other ranks when rank 0 could not read a tensor that it was to send."""


class Shared(Mapping[str, torch.Tensor]):
    """Tensors of rank 0. Each is sent to the others when it is asked for, so that no rank holds them all.

    All ranks must ask for the same tensors in the same order. If rank 0 can't read one, all get an error.
    """

    def __init__(self, outlines: list[Outline], held: Mapping[str, torch.Tensor] | None = None) -> None:
        self._outlines = {name: (dtype, shape) for name, dtype, shape in outlines}
        self._held = held

    @staticmethod
    def outlines_of(tensors: Mapping[str, torch.Tensor]) -> list[Outline]:
        """Return name, dtype and shape of each tensor, which rank 0 sends to the others beforehand."""
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

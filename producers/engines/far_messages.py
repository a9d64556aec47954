"""Messages between rank 0 of an engine and another machine that holds ranks of it, each a frame of msgpack.

machine ──► rank 0   MachineHello; then, for each rank there, two connections that begin with LinkHello
rank 0 ──► machine   StartRanks, once · PatchFollows, with the patch's bytes behind it · DropPatch
machine ──► rank 0   Marked, twice a second · RankEnded · PatchTaken · MachineRefused

The connections of a rank then carry what `rank_messages.py` says, as between ranks of one machine.
"""

from __future__ import annotations

import msgspec

from producers.engines.engine_messages import EngineOptions
from producers.engines.rank_meeting import FarMeeting

TO_MACHINE_BYTES = 64 << 20  # the largest message to a machine; a patch is none
FROM_MACHINE_BYTES = 1 << 20  # the largest message of a machine


class MachineHello(msgspec.Struct, tag="machine", frozen=True):
    """The first frame of a machine that offers ranks."""

    ranks: int  # that it can hold
    versions: str  # of the code that computes
    config: str  # digest of the model's config there
    gpus: str = ""  # kinds of GPUs that it has


class LinkHello(msgspec.Struct, tag="link", frozen=True):
    """The first frame of a connection of one rank."""

    token: str  # that StartRanks gave this machine
    rank: int
    beside: bool  # whether it is for work beside steps, or else for acts


class StartRanks(msgspec.Struct, tag="start"):
    """To a machine: start these ranks. It has a folder of the model of its own."""

    engine: EngineOptions
    numbers: list[int]
    meeting: FarMeeting  # as rank 0 has it
    group: str
    token: str


class NotTaken(msgspec.Struct, tag="not_taken"):
    """To a machine: it can't hold ranks of this engine."""

    reason: str


class PatchFollows(msgspec.Struct, tag="patch"):
    """To a machine: so many bytes of a patch follow, and their digest. All ranks there read it."""

    size: int


class DropPatch(msgspec.Struct, tag="drop"):
    """To a machine: all ranks have read the patch."""


class Marked(msgspec.Struct, tag="marked"):
    """From a machine: how far its ranks are. See `RankMarks`."""

    marks: list[tuple[int, int, int]]  # rank, acts begun, acts done


class RankEnded(msgspec.Struct, tag="ended"):
    """From a machine: the process of a rank has ended."""

    rank: int
    how: str


class PatchTaken(msgspec.Struct, tag="taken"):
    """From a machine: the patch is there, and has the digest that it should have."""

    file: str  # by which ranks there open it


class MachineRefused(msgspec.Struct, tag="refused"):
    """From a machine: it could not take a patch."""

    reason: str


EngineHello = MachineHello | LinkHello
ToMachine = StartRanks | NotTaken | PatchFollows | DropPatch
FromMachine = Marked | RankEnded | PatchTaken | MachineRefused

"""Messages between the ranks of an engine. Rank 0 leads: it sends lists of acts, as msgpack.

acts      in the order in which rank 0 does them itself; all ranks do the same between the same two steps
beside    what need not be done between two steps, over a connection of its own
"""

from __future__ import annotations

import msgspec

from producers.engines.engine_messages import (
    Abort,
    GoOn,
    HandOver,
    Install,
    Paced,
    Prepare,
    Ready,
    Refused,
    Rest,
    Submit,
)


class Step(msgspec.Struct, tag="step"):
    """To a rank: make one decode step. `drawn`: a digest of all answers that rank 0 drew before it."""

    drawn: bytes


class Decided(msgspec.Struct, tag="decided"):
    """To a rank, within a step: what rank 0 has decided by its clock."""

    numbers: list[float]


class Hash(msgspec.Struct, tag="hash"):
    """To a rank, beside steps: hash the slices that you hold."""


class Did(msgspec.Struct, tag="did"):
    """From a rank: it did what it was told. `digest`: of what came of it, the same on all ranks."""

    digest: bytes


class SlicesHeld(msgspec.Struct, tag="slices_held"):
    """From a rank, beside steps: weights are prepared (then without digests), or the hashes of its slices."""

    digests: dict[str, str]


Act = Submit | Abort | HandOver | Install | Rest | GoOn | Step | Decided
BesideAct = Prepare | Hash
RankReport = Paced | Ready | Did | Refused
BesideReport = SlicesHeld | Refused

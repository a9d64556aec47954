"""Messages between a generator and its engine process: lists of these classes, as msgpack."""

from __future__ import annotations

import msgspec

from producers.engines.engine import FarRanksAsked, Installed, Pace, SampleRequest


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of an engine."""

    model: str  # folder
    spec: str  # the run spec, as JSON
    far: FarRanksAsked | None = None  # None: it has no ranks on other machines


class Submit(msgspec.Struct, tag="submit"):
    """To the engine: make a sample."""

    request: SampleRequest


class Abort(msgspec.Struct, tag="abort"):
    """To the engine: drop these samples."""

    ids: list[str]


class HandOver(msgspec.Struct, tag="hand_over"):
    """To the engine: hand these samples over, for another generator."""

    ids: list[str]


class Prepare(msgspec.Struct, tag="prepare"):
    """To the engine: prepare the weights in this patch file."""

    file: str


class Install(msgspec.Struct, tag="install"):
    """To the engine: install the prepared weights."""

    recompute: bool


class Rest(msgspec.Struct, tag="rest"):
    """To the engine: draw nothing until GoOn comes, and free what memory you can."""


class GoOn(msgspec.Struct, tag="go_on"):
    """To the engine: go on where you rested."""


class Ready(msgspec.Struct, tag="ready"):
    """From the engine: it can take requests."""


class AnswerReport(msgspec.Struct, tag="made"):
    """From the engine: a DrawnAnswer, with its arrays as bytes."""

    id: str
    tokens: bytes  # int32
    logprobs: bytes  # float32
    finish: str
    routes: bytes = b""  # see DrawnAnswer; empty: None
    routed: tuple[int, int, int] = (0, 0, 0)  # the routes' layers, experts taken, and bytes of a number


class Handed(msgspec.Struct, tag="handed"):
    """From the engine: the samples that it handed over, as far as it had made them."""

    parts: list[AnswerReport]


class PreparedReport(msgspec.Struct, tag="prepared"):
    """From the engine: weights are prepared. Sent once for each Prepare."""


class Took(msgspec.Struct, tag="took"):
    """From the engine: the weights are installed."""

    installed: Installed


class Rested(msgspec.Struct, tag="rested"):
    """From the engine: it rests."""


class Holds(msgspec.Struct, tag="holds"):
    """From the engine: the hashes of its tensors since the last install."""

    digests: dict[str, str]


class Paced(msgspec.Struct, tag="paced"):
    """From the engine: how long its steps take, and its tokens so far.

    Sent before Ready, and now and then.
    """

    pace: Pace
    tokens: dict[str, int]  # of unfinished samples


class Refused(msgspec.Struct, tag="refused"):
    """From the engine: the error that ends it."""

    reason: str
    lasting: bool = False  # another start of the engine would meet it again


Order = Submit | Abort | HandOver | Prepare | Install | Rest | GoOn
Report = Ready | AnswerReport | Handed | PreparedReport | Took | Rested | Holds | Paced | Refused

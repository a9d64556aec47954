"""What a generator and its engine process say to each other, in lists, as msgpack."""

from __future__ import annotations

import msgspec

from producers.engines.engine import Installed, Pace, SampleRequest


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `VllmEngine` is made with."""

    model: str
    dtype: str
    slots: int
    max_model_len: int
    temperature: float
    kv_cache_mib: int
    threads: int
    batch_invariant: bool


class Submit(msgspec.Struct, tag="submit"):
    """To the engine: a sample to be made."""

    request: SampleRequest


class Abort(msgspec.Struct, tag="abort"):
    """To the engine: samples that are not wanted any more."""

    ids: list[str]


class HandOver(msgspec.Struct, tag="hand_over"):
    """To the engine: samples that another one goes on with."""

    ids: list[str]


class Prepare(msgspec.Struct, tag="prepare"):
    """To the engine: weights that come next, as a file with a patch."""

    file: str


class Install(msgspec.Struct, tag="install"):
    """To the engine: go on with the weights that it said are prepared."""

    recompute: bool


class Ready(msgspec.Struct, tag="ready"):
    """From the engine: it can take requests."""


class MadeReport(msgspec.Struct, tag="made"):
    """From the engine: a finished sample, or how far one is."""

    id: str
    tokens: bytes  # int32
    logprobs: bytes  # float32
    finish: str


class Handed(msgspec.Struct, tag="handed"):
    """From the engine: how far it had made those that it handed over."""

    parts: list[MadeReport]


class PreparedReport(msgspec.Struct, tag="prepared"):
    """From the engine: the weights that come next can be installed. One for each that were to be prepared."""


class Took(msgspec.Struct, tag="took"):
    """From the engine: the weights are installed."""

    installed: Installed


class Holds(msgspec.Struct, tag="holds"):
    """From the engine: what it holds since it took weights."""

    digests: dict[str, str]


class Paced(msgspec.Struct, tag="paced"):
    """From the engine: how long its steps take, and how far it is. Before it is ready, and now and then."""

    pace: Pace
    tokens: dict[str, int]  # of what it has not finished


class Refused(msgspec.Struct, tag="refused"):
    """From the engine: why it ends."""

    reason: str


Order = Submit | Abort | HandOver | Prepare | Install
Report = Ready | MadeReport | Handed | PreparedReport | Took | Holds | Paced | Refused

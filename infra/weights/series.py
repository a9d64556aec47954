"""Decides which paths a new version gets: a delta each, longer ones now and then, and keyframes.

version   0    1    2   …   8        …  16   …  32
          key  ─►   ─►      ─►          ─►      ─►        from the version before
                            ════════►   ═══►              from 8 before: less than the eight between
                                                ═════►    from 32 before
                                                key       a keyframe: a short way for readers that join late

A publisher that has just begun holds nothing, and begins with a keyframe. The bits of versions from which
longer paths will begin are kept in unnamed files, two at most. Without room for them there are no longer
paths; every 32nd version is a keyframe all the same.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from infra.weights.bits import Bits, Model
from infra.weights.codec.chunks import encode_model
from infra.weights.gpu_bits import lies_on_gpu, own_stream_for

_SKIPS = (8, 32)
_PIECE = 1 << 22  # elements that are written at a time: those of a GPU come to main memory before
_FROM_GPU = 2, 4  # threads: while some wait for the GPU another codes; eight were slower than four
KEYFRAME_AFTER = 32  # versions
_log = logging.getLogger("streamrl.weights")
_KEYFRAME_SHARE = 0.35  # of the model's bytes: a keyframe is due when deltas since the last one exceed it


@dataclass(frozen=True)
class Held:
    """A version with its bits."""

    version: int
    root: str
    model: Model

    @property
    def size(self) -> int:
        return sum(bits.nbytes for bits in self.model.values())


@dataclass(frozen=True)
class PathPlan:
    """A path to be made, from an older version's bits or from nothing (`since` is None)."""

    since: Held | None

    def chunks(self, new: Held, threads: int) -> Iterator[bytes]:
        """Yield the chunks that make the new version."""
        if self.since and lies_on_gpu(new.model):
            fewest, most = _FROM_GPU
            threads = min(most, max(fewest, threads))
        return encode_model(self.since.model if self.since else None, new.model, threads=threads)


class Series:
    """A publisher's memory of what it has published, from which it plans the paths of the next version."""

    def __init__(self) -> None:
        self._last: Held | None = None
        self._skips: dict[int, Held] = {}
        self._keyframe = -1  # version of the last keyframe
        self._since = 0  # bytes of deltas since then
        self._dense = -1  # version up to which deltas are not worth trying
        self._warned = False

    def plans(self, new: Held) -> Iterator[PathPlan]:
        """Yield the paths to make for a new version, one after the other. Call `made` after each."""
        last = self._last
        if last is None or last.version != new.version - 1 or not _alike(last.model, new.model):
            yield PathPlan(None)
            return
        if new.version > self._dense:
            yield PathPlan(last)
        worth = new.version > self._dense  # `made` may have found that deltas are not
        due = new.version - self._keyframe >= KEYFRAME_AFTER
        if due or not worth or self._since > _KEYFRAME_SHARE * new.size:
            yield PathPlan(None)
        for skip in _SKIPS:
            held = self._skips.get(skip)
            if new.version % skip == 0 and held is not None and held.version == new.version - skip:
                yield PathPlan(held)

    def made(self, plan: PathPlan, new: Held, size: int) -> bool:
        """Record how large a path has become, in bytes. Returns False if it is not worth having."""
        if plan.since is None:
            self._keyframe, self._since = new.version, 0
            return True
        if plan.since is not self._last:
            return size < _KEYFRAME_SHARE * new.size
        self._since += size
        if size > _KEYFRAME_SHARE * new.size:  # nearly all changes: only keyframes for a while
            self._dense = new.version + _SKIPS[0]
            return False
        return True

    def spool(self, new: Held) -> None:
        """Keep the bits of a version whose paths are made, if longer ones will begin with it.

        Called before the version is committed: what may fail is done by then. All paths that will begin here
        share one file, and the files that it replaces are dropped first.
        """
        due = [skip for skip in _SKIPS if new.version % skip == 0]
        for skip in due:
            self._skips.pop(skip, None)
        if not due:
            return
        try:
            held = Held(new.version, new.root, _spooled(new.model))
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "the weights of version %d can't be kept in a file (%s): readers far behind get a "
                    "whole version instead of what changed since theirs. Make room, or set TMPDIR",
                    new.version, error,
                )  # fmt: skip
            return
        self._skips |= dict.fromkeys(due, held)

    def published(self, new: Held) -> None:
        """Record that a version is in the store: the next delta begins with it."""
        self._last = new


def _alike(one: Model, other: Model) -> bool:
    return {name: (bits.dtype, bits.shape) for name, bits in one.items()} == {
        name: (bits.dtype, bits.shape) for name, bits in other.items()
    }


def _spooled(model: Model) -> dict[str, Bits]:
    """Return a model with equal bits in an unnamed file, where they take no memory: they are rarely read."""
    with tempfile.TemporaryFile(prefix="streamrl-weights-") as file:
        with own_stream_for(model):  # else each piece would wait for all that training has queued
            for bits in model.values():
                for at in range(0, bits.size, _PIECE):
                    file.write(bits.part(at, _PIECE).view(np.uint8).data)
        file.flush()
        if not file.tell():
            return dict(model)
        whole = np.memmap(file, np.uint8, "r")
    found, at = {}, 0
    for name, bits in model.items():
        raw = whole[at : at + bits.nbytes]
        found[name] = Bits(bits.dtype, bits.shape, np.asarray(raw).view(bits.kind.unsigned))
        at += bits.nbytes
    return found

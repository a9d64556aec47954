"""Draws recorded samples again: weights change at the tokens at which they changed when they were drawn.

    weights ──► a group of samples, begun one after the other, so that all come to their change at once
                  └─► decode steps ──► the next weights, between two steps ──► decode steps ──► answers

A sample's bits do not depend on those beside it, so samples may be drawn in other company than at first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from infra.weights.patch import read_patch
from infra.weights.weights_error import WeightsError
from producers.engines.engine import DrawnAnswer, LocalEngine, SampleRequest


class RedrawnWeights(msgspec.Struct, frozen=True):
    """Weights to install: a patch file, and the hash of each tensor that the engine must hold then."""

    file: str
    digests: dict[str, str]


class RedrawBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that are drawn together, with the same changes of weights at the same decode steps."""

    first: RedrawnWeights | None  # None: the engine holds them already
    begins: list[int]  # by request: the decode step at which it begins
    requests: list[SampleRequest]
    changes: list[int]  # decode steps before which the weights change, ascending
    weights: list[RedrawnWeights]  # by change
    recompute: list[bool]  # by change: whether the KV cache is computed anew (generator.on_update)


class OutOfStep(Exception):
    """Raised when a sample does not have as many tokens at a change as it had when it was drawn first."""


def redraw(engine: LocalEngine, batch: RedrawBatch) -> list[DrawnAnswer]:
    """Draw the samples of a batch. Raises OutOfStep, and then none of them is left in the engine.

    A sample by itself is never out of step: its tokens are counted instead of the engine's steps.
    """
    if batch.first is not None:
        install_again(engine, batch.first, recompute=False)
    changes = dict(zip(batch.changes, zip(batch.weights, batch.recompute, strict=True), strict=True))
    waiting = sorted(zip(batch.begins, batch.requests, strict=True), key=lambda one: one[0])
    begun: dict[str, int] = {}
    found: dict[str, DrawnAnswer] = {}
    moment = 0
    while len(found) < len(batch.requests):
        while waiting and waiting[0][0] <= moment:
            at, request = waiting.pop(0)
            engine.submit(request)
            begun[request.id] = at
        if moment in changes:
            _check_in_step(engine, {name: moment - at for name, at in begun.items() if name not in found})
            weights, recompute = changes.pop(moment)
            install_again(engine, weights, recompute=recompute)
        found |= {one.id: one for one in engine.step(0.0)}
        if len(batch.requests) == 1:
            moment = engine.unfinished().get(batch.requests[0].id, moment)
        else:
            moment += 1
    for weights, _ in changes.values():  # all ended before: the engine shall hold the last weights anyhow
        install_again(engine, weights, recompute=False)
    return [found[one.id] for one in batch.requests]


def install_again(engine: LocalEngine, weights: RedrawnWeights, *, recompute: bool) -> None:
    """Install weights, and check by their hashes that the engine holds them."""
    engine.prepare(read_patch(Path(weights.file)))
    engine.install(recompute=recompute)
    held = engine.digests()
    if wrong := sorted(name for name, digest in weights.digests.items() if held.get(name) != digest):
        raise WeightsError(f"the engine does not hold the weights that it was given: {', '.join(wrong[:3])}")


def _check_in_step(engine: LocalEngine, expected: Mapping[str, int]) -> None:
    tokens = engine.unfinished()
    if all(tokens.get(name) == count for name, count in expected.items()):
        return
    engine.abort(list(tokens))
    raise OutOfStep


def begins_of_requests(changes: Sequence[int]) -> list[int]:
    """Return when samples begin that come to their first change after so many tokens each."""
    return [max(changes, default=0) - one for one in changes]

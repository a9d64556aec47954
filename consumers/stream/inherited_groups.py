"""The groups that a fork may train again (`loss.replay`) though its run trained them before the fork began.

    run's ledger ──► places ──► samples, from log or archive ──► the fork's own `<fork>.samples`
                                                                   └──► their places there ──► the store

runs/<fork>/inherited.json     sealed; written once, before the fork's first checkpoint

So the fork's steps draw what the run's steps would have drawn, also when the run is removed.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from consumers.batches.log_places import Gone, fetch
from consumers.batches.training_rows import TrainingRow
from consumers.steps.ledger import steps_in_ledger
from consumers.stream.recorded_places import Recorded, StepPlaces
from infra.bus import Writer, begins_of
from infra.errors import Explained
from infra.keys import KeysError, ring_from_env
from infra.run_handle import RunHandle
from infra.sealed import sealed, unseal
from infra.stores.store import Missing
from schemas.wire import encode

_REPLAYED = 1000  # newest iterations whose groups are trained again: older ones are hardly of this policy
_AT_ONCE = 256  # samples that are copied at once: with long answers they take some 100 MB
_KIND = "inherited groups"  # kind of the signed content
_LARGEST = 1 << 30  # bytes
_ARRAYS = {"iterations": "<i8", "groups": "<i4", "members": "<i4", "partitions": "<i2", "offsets": "<i8"}

CopyProgress = Callable[[int, int], None]  # groups copied, of how many


class InheritedError(Explained):
    """The record of a fork's inherited groups can't be used."""

    lasting = True


def groups_before(handle: RunHandle, step: int) -> Recorded:
    """Return the groups that a run may train again at a step."""
    algorithm = handle.spec.algorithm
    start = handle.ledger_before(step - _REPLAYED * algorithm.optimizer_steps)
    earlier = (one for one in steps_in_ledger(handle, start) if one.step < step)
    return Recorded(algorithm, earlier, kept=_REPLAYED, before=_inherited(handle))


def inherit(parent: RunHandle, fork: RunHandle, progress: CopyProgress = lambda done, total: None) -> int:
    """Give a fork the groups that its run could train again at its first step; return how many are gone.

    Samples that neither log nor archive has any more are left out with their steps, as by a trainer.
    """
    assert fork.record.fork is not None
    known = groups_before(parent, fork.record.fork.step)
    total = len(known)
    known.drop(begins_of(parent.bus, parent.topics.samples))
    found: list[StepPlaces] = []
    writer, done = fork.bus.writer(), total - len(known)
    try:
        for step in known:
            if (copied := _copied(parent, fork, writer, step)) is not None:
                found.append(copied)
            done += step.starts.size
            progress(done, total)
    finally:
        writer.close()
    fork.store.put_new(_key(fork.run), _packed(fork.run, found))
    return total - sum(step.starts.size for step in found)


def _copied(parent: RunHandle, fork: RunHandle, writer: Writer, step: StepPlaces) -> StepPlaces | None:
    """Copy the samples of a step; None if one of them is gone."""
    places = [place for group in range(step.starts.size) for place in step.places(group)]
    sent: list[tuple[int, int]] = []
    try:
        for first in range(0, len(places), _AT_ONCE):
            rows = fetch(
                parent.bus, parent.topics.samples, places[first : first + _AT_ONCE],
                what=f"the samples of iteration {step.iteration}",
                deadline_s=parent.spec.deadlines.progress_s,
            )  # fmt: skip
            sent += copied_samples(fork, writer, rows)
    except Gone:
        return None
    partitions, offsets = zip(*sent, strict=True) if sent else ((), ())
    return StepPlaces(
        step.iteration, np.array(partitions, np.int16), np.array(offsets, np.int64), step.starts
    )


def copied_samples(fork: RunHandle, writer: Writer, rows: Sequence[TrainingRow]) -> list[tuple[int, int]]:
    """Write samples of a fork's run to the fork's own topic; return their places there."""
    topic = fork.topics.samples
    sent = [
        writer.send(
            topic, encode(structs.replace(row.sample, run=fork.run)), key=row.sample.id,
            partition=row.partition,
        )
        for row in rows
    ]  # fmt: skip
    writer.flush(fork.spec.deadlines.progress_s)
    return [(row.partition, one.offset()) for row, one in zip(rows, sent, strict=True)]


def _key(run: str) -> str:
    return f"runs/{run}/inherited.json"


def _packed(run: str, steps: Sequence[StepPlaces]) -> bytes:
    arrays = {
        "iterations": [step.iteration for step in steps],
        "groups": [step.starts.size for step in steps],
        "members": _joined(np.diff(step.starts, append=step.offsets.size) for step in steps),
        "partitions": _joined(step.partitions for step in steps),
        "offsets": _joined(step.offsets for step in steps),
    }
    texts = {
        name: base64.b64encode(np.asarray(values, _ARRAYS[name]).tobytes()).decode()
        for name, values in arrays.items()
    }
    return sealed({"format": 1, "run": run, **texts}, ring_from_env(), _KIND)


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _inherited(handle: RunHandle) -> list[StepPlaces]:
    """Return the groups that a fork began with; none if it is no fork. Raises InheritedError."""
    fork, store, key = handle.record.fork, handle.store, _key(handle.run)
    if fork is None:
        return []
    where = f"{store.url}/{key}"
    try:
        if (size := store.size(key)) > _LARGEST:
            raise ValueError(f"it has {size} bytes; {_LARGEST} are the most")
        said = json.loads(store.get(key))
        if not isinstance(said, dict):
            raise ValueError("it is no JSON object")
        unseal(said, ring_from_env(), where, _KIND)
        if (said.get("format"), said.get("run")) != (1, handle.run):
            raise ValueError("it is of another run, or of a newer format")
        return list(_steps_of(said, handle.spec.lengths.classes, fork.iteration))
    except Missing:
        return []  # its loss had no replay when it was made, or its version of StreamRL could not copy them
    except (KeysError, ValueError, RecursionError) as error:
        raise InheritedError(
            f"{where} does not say which groups of {fork.words} can be trained again ({str(error)[:300]}): "
            "remove this run (streamrl rm), and fork again"
        ) from error


def _steps_of(said: dict[str, Any], classes: int, before: int) -> Iterator[StepPlaces]:
    """Yield the steps of a packed record. Raises ValueError if its arrays contradict each other."""
    try:
        iterations, groups, members, partitions, offsets = (
            np.frombuffer(base64.b64decode(said[name], validate=True), kind) for name, kind in _ARRAYS.items()
        )
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"an array is missing or damaged: {error!r}") from None
    if iterations.size != groups.size or partitions.size != offsets.size:
        raise ValueError("its arrays are not of one length")
    if min(groups.min(initial=0), offsets.min(initial=0), partitions.min(initial=0)) < 0:
        raise ValueError("a number is below 0")
    if partitions.max(initial=0) >= classes or members.min(initial=1) < 1:
        raise ValueError("it names a partition that there is not, or a group without samples")
    if iterations.size and not (
        iterations[0] >= 0 and iterations[-1] < before and (np.diff(iterations) >= 0).all()
    ):
        raise ValueError("its iterations are not those before the fork, in order")
    if int(groups.sum(dtype=np.int64)) != members.size or int(members.sum(dtype=np.int64)) != offsets.size:
        raise ValueError("its groups don't have as many samples as it names")
    group = sample = 0
    for iteration, count in zip(iterations.tolist(), groups.tolist(), strict=True):
        mine = members[group : group + count].astype(np.int64)
        end = sample + int(mine.sum())
        yield StepPlaces(iteration, partitions[sample:end], offsets[sample:end], np.cumsum(mine) - mine)
        group, sample = group + count, end

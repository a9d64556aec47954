"""Chooses the versions whose weights a step file has beside its state.

A step is replayed from the state before it, which has no older weights. Two questions need some: sampling
its samples again, if older weights drew them; and `streamrl explain`, if the log-probabilities that came with
samples are not those of the weights that they name. Then a generator may have had an older version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from consumers.replay import CapturedSteps
from consumers.steps.telling import gap_is_too_wide
from flows.run.version_weights import VersionWeights
from infra.run_handle import RunHandle
from infra.step_file.layout import room_of
from infra.weights.bits import Model, model_of

_OLDER = 4  # whoever opens the file holds all of them in memory
# Of the state's room, for versions that nobody has asked for. An older version takes .003 to .1 of it in
# bf16, and .15 to .3 in fp32, by the learning rate; moments and master weights are in fp32 in both.
_SHARE = 1.0


def versions_beside(
    found: CapturedSteps, handle: RunHandle, state: Model, *, regenerate: bool
) -> dict[int, Model]:
    """Return the weights of versions that a step file should have beside its state, by number.

    `regenerate`: those of all versions that drew the samples. If a step's log-probabilities are far from
    its generators', also older ones, which may be the cause; without `regenerate` only if they take little
    room.
    """
    wide = [
        one
        for one in (*found.records, *([found.failed] if found.failed else []))
        if gap_is_too_wide(one.metrics, handle.spec)
    ]
    own = found.samples.name == handle.topics.samples.name  # an offline run has not drawn its samples
    if not regenerate and not (wide and own):
        return {}
    named = _named(found, handle)
    newest = found.first // handle.spec.algorithm.optimizer_steps
    weights = VersionWeights(handle, None, lambda done, total: None)
    try:
        if regenerate:
            chosen = {version: model_of(weights.published(version, root)) for version, root in named.items()}
            older = dict.fromkeys(one for one in _older(newest) if one not in named)
            return chosen | (dict(_kept(weights, older)) if wide and own else {})
        wanted = {**dict.fromkeys(_older(newest)), **named}
        return dict(_cheap(_kept(weights, wanted), state))
    finally:
        weights.close()


def versions_named(versions: Sequence[int]) -> str:
    """Name some versions, for people."""
    words = ", ".join(map(str, versions))
    return f"version{'s' if len(versions) > 1 else ''} {words}"


def _named(found: CapturedSteps, handle: RunHandle) -> dict[int, str]:
    """Return the versions that drew the samples, with their roots, but for the one that the state has."""
    named = {
        version: root
        for row in found.rows
        for version, root in zip(row.sample.versions.tolist(), row.sample.roots, strict=True)
    }
    first, mini = divmod(found.first, handle.spec.algorithm.optimizer_steps)
    if not mini:
        named.pop(first, None)
    return {version: named[version] for version in sorted(named, reverse=True)}


def _older(version: int) -> list[int]:
    """Return the versions that a generator may have had in place of one: those before it, and the first."""
    found = dict.fromkeys([version - 1, 0, *range(version - 2, 0, -1)])
    return [one for one in found if 0 <= one < version][:_OLDER]


def _kept(weights: VersionWeights, wanted: Mapping[int, str | None]) -> Iterator[tuple[int, Model]]:
    for version, root in wanted.items():
        if (held := weights.kept(version, root)) is not None:
            yield version, model_of(held)


def _cheap(versions: Iterator[tuple[int, Model]], state: Model) -> Iterator[tuple[int, Model]]:
    """Yield versions as long as all of them together take little room beside the state."""
    left = _SHARE * sum(room_of(one, None) for one in state.values())
    for version, model in versions:
        left -= sum(room_of(bits, state.get(f"weights.{name}")) for name, bits in model.items())
        if left < 0:
            return
        yield version, model

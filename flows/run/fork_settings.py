"""The settings of a fork: those of its run, with changes that still fit the past that both have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows.run.what_if_settings import has_critic, with_changed_keys
from infra.resuming import learned_otherwise
from infra.runs import RunRecord
from schemas.loading import RunFileError, apply_override, changes_of, validate
from schemas.runspec import SEAMS, RunSpec
from schemas.seams import SeamSection
from schemas.shortening import printable

_KEPT = {  # settings that the past depends on, and the reason
    "run": "it is the name that seeds follow from; --name gives the fork's id another",
    "seed": "problems would come in another order, and some of them twice",
    "model": "the state at that step is of this model",
    "algorithm.groups": "steps and problems are counted in iterations of so many groups",
    "algorithm.optimizer_steps": "steps are counted in iterations of so many",
    "algorithm.mode": "the past of a fork is of this mode",
    "algorithm.recorded": "the past of a fork trained that run's samples",
    "lengths": "the ranker has learned by these",
    "placement.store": "the fork lies in the store of its run",
}
_OF_DRAWING = (
    "task.", "sampling.", "generator.", "trainer.compose", "trainer.bundle_tokens", "algorithm.staleness",
    "algorithm.order", "algorithm.group_size",
)  # fmt: skip
_OF_ARRIVAL = ("order", "staleness", "staleness_cap")


def forked_settings(record: RunRecord, changes: Sequence[str], iteration: int) -> RunSpec:
    """Return a run's settings with changes, for a fork at an iteration. Raises RunFileError."""
    spec = record.spec
    if not changes:
        return spec
    data = spec.model_dump(mode="json")
    for section, said in changes_of(changes).items():
        names = [f"{section}.{key}" for key in said] if isinstance(said, dict) else [section]
        for name in names:
            reason = _KEPT.get(name) or _KEPT.get(section)
            if reason:
                raise RunFileError(f"--set {printable(name, 200)}: a fork can't change it: {reason}")
        if isinstance(said, dict) and isinstance(now := getattr(spec, section, None), SeamSection):
            data[section] = with_changed_keys(now, said, SEAMS[section])
        else:  # one by one: what a section in a section has besides stays
            for change in changes:
                if change.partition("=")[0].partition(".")[0] == section:
                    apply_override(data, change)
    found = validate(data, Path(f"{record.id}.yaml"), overrides=changes)
    if found.algorithm.iterations <= iteration:
        raise RunFileError(
            f"--set algorithm.iterations={found.algorithm.iterations}: the fork begins with iteration "
            f"{iteration}, so nothing would be left to train"
        )
    if spec.algorithm.order == "arrival":
        for name in _OF_ARRIVAL:
            if getattr(found.algorithm, name) != getattr(spec.algorithm, name):
                raise RunFileError(
                    f"--set algorithm.{name}: a fork can't change it: in order arrival groups were trained "
                    "before their turn, and this setting says which ones must be trained by when. Start a "
                    "new run"
                )
    if has_critic(found) and not has_critic(spec):
        raise RunFileError(
            f"--set loss.kind={found.loss.kind}: it trains a critic, and the state at that step has none: "
            "start a new run"
        )
    return found


def rewarded_otherwise(old: RunRecord, new: RunRecord) -> list[str]:
    """Return the settings by which a run's samples, or their rewards, would be others in its fork."""
    changed = learned_otherwise(old.spec, new.spec, old.contents, new.contents)
    return [name for name in changed if name.startswith(("task.", "sampling."))]


def drawn_otherwise(old: RunRecord, new: RunRecord) -> list[str]:
    """Return the settings by which groups of a run would be admitted or drawn otherwise in its fork."""
    changed = learned_otherwise(old.spec, new.spec, old.contents, new.contents)
    found = [name for name in changed if name.startswith(_OF_DRAWING)]
    if old.spec.loss.most_draws != new.spec.loss.most_draws:
        found.append("loss.resample")
    return found

"""Asks what a run's steps would have been with other settings, from a run or a step file."""

from __future__ import annotations

from collections.abc import Sequence

from consumers.learners.learner import Learner
from consumers.losses.loss import loss_of
from consumers.ranks.choose_learner import learner_of
from consumers.what_if import Variant, WhatIf, WhatIfCurve, WhatIfProgress
from flows.run.replaying import Replaying
from flows.run.request import RunFailed
from schemas.runspec import RunSpec

_STEPS = 10  # taken if nobody says how many


def last_step(opened: Replaying, first: int, steps: int | None) -> int:
    """Return the last step to take; without a number of steps, at most ten and as many as there are."""
    newest = opened.index.last if opened.index is not None else opened.again.newest()
    return min(first + _STEPS - 1, max(newest, first)) if steps is None else first + steps - 1


def what_if_curves(
    opened: Replaying, first: int, last: int, variants: Sequence[Variant], progress: WhatIfProgress
) -> list[WhatIfCurve]:
    """Return the run's own curve over some steps, and then those of the variants."""
    handle = opened.handle

    def make(spec: RunSpec) -> Learner:
        return learner_of(handle.record.model, spec, run=handle.run, log=handle.log)

    for variant in variants:
        _check_reference(opened, variant)
    return list(WhatIf(opened.again, handle.spec, make, progress).curves(first, last, variants))


def _check_reference(opened: Replaying, variant: Variant) -> None:
    """Raise RunFailed if a step file lacks the model that a variant's divergence is taken from."""
    needs = loss_of(variant.spec).needs.reference and variant.spec.loss.reference is None
    if opened.index is not None and needs and not opened.again.needs.reference:
        raise RunFailed(
            f"{variant.name}: this loss needs a reference policy, and the step file has none, as the "
            "run's own loss needs none. Set loss.reference to the folder of the model that the run began with"
        )

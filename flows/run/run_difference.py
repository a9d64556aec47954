"""The difference of two runs, step by step, as their ledgers have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from consumers.steps.ledger import steps_in_ledger
from infra.run_handle import RunHandle
from schemas.identity import digest_of_seeds
from schemas.messages import StepRecord
from schemas.stages import Stage

_COMPARED = ("reward", "length", "entropy", "grad_norm", "loss", "logprob_gap")


def differences(ours: RunHandle, theirs: RunHandle) -> Iterator[dict[str, Any]]:
    """Yield for each step that both ledgers have how the second run differs from the first."""
    left = steps_in_ledger(theirs)  # both are in order, so that neither ledger is held
    other = next(left, None)
    for step in steps_in_ledger(ours):
        while other is not None and other.step < step.step:
            other = next(left, None)
        if other is not None and other.step == step.step:
            yield _difference(step, other)


def _difference(ours: StepRecord, theirs: StepRecord) -> dict[str, Any]:
    same = bool(ours.stages.size and theirs.stages.size)
    stage = next((one.title for one in Stage if same and ours.stages[one] != theirs.stages[one]), None)
    found: dict[str, Any] = {
        "step": ours.step, "same_weights": ours.root_out == theirs.root_out,
        "same_samples": _seeds(ours) == _seeds(theirs), "first_other_stage": stage,
    }  # fmt: skip
    for name in _COMPARED:
        if name in ours.metrics and name in theirs.metrics:
            found[name] = [ours.metrics[name], theirs.metrics[name]]
    return found


def _seeds(step: StepRecord) -> str:
    return step.seeds_digest or digest_of_seeds(step.seeds.tolist())

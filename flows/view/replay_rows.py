"""A replayed step as plain values, for `--json` and for tables."""

from __future__ import annotations

import math
from typing import Any

from consumers.replay import Replayed, Spoilt
from consumers.steps.stage_comparison import StageFound, first_other
from infra.machine_kind import kind_of_machine
from schemas.identity import sample_id
from schemas.messages import StepRecord
from schemas.stages import MEANINGS

ReplayRow = dict[str, Any]


def replay_row(found: Replayed) -> ReplayRow:
    """Return what a replay of a step found."""
    record, first = found.record, first_other(found.stages)
    return {
        "run": record.run, "step": record.step, "iteration": record.iteration,
        "samples": int(record.groups.size), "groups": sorted(set(record.groups.tolist())),
        "from": found.start, "equal": found.equal, "as_expected": found.as_expected,
        "first_other": None if first is None else stage_row(first, record),
        "stages": [stage_row(one, record) for one in found.stages],
        "micro_batches": [
            {
                "samples": len(batch.rows), "tokens": stat.tokens, "loss": _number(loss),
                "loss_found": _number(stat.loss),
            }
            for batch, stat, loss in zip(
                found.taken.batches, found.taken.stats, record.losses.tolist(), strict=False
            )
        ],
        "root": record.root_out, "root_found": found.taken.root, "others_before": found.others,
        "same_recipe": found.same_recipe, "made_on": record.made_on, "here": kind_of_machine(),
    }  # fmt: skip


def stage_row(found: StageFound, record: StepRecord) -> ReplayRow:
    """Return what became of one stage."""
    return {
        "stage": found.stage.title, "equal": found.equal, "apart": _number(found.apart),
        "tolerance": found.tolerance, "unit": MEANINGS[found.stage].unit,
        "sample": None if found.row is None else sample_of(record, found.row),
    }  # fmt: skip


def sample_of(record: StepRecord, row: int) -> str:
    """Return the id of a step's sample."""
    return sample_id(int(record.groups[row]), int(record.indexes[row]))


def spoilt_row(found: Spoilt) -> ReplayRow:
    """Return why a step could not be taken."""
    record = found.record
    return {
        "run": record.run, "step": record.step, "iteration": record.iteration, "samples": found.samples,
        "from": found.start, "micro_batches": found.batches, "reason": found.reason,
        "micro_batch": found.batch, "of_samples": list(found.members),
        "alone": [{"sample": name, "reason": why} for name, why in found.alone],
    }  # fmt: skip


def _number(value: float) -> float | str:
    """Return a number as JSON can have it: infinity and NaN as text."""
    return value if math.isfinite(value) else str(value)

"""Samples that were sampled again, or whose rewards were computed again, as plain values."""

from __future__ import annotations

import math
from typing import Any

from flows.run.recorded_samples import RedrawnStep, RescoredStep
from flows.run.rescoring import Rescored
from infra.machine_kind import kind_of_machine
from producers.regenerating import Redrawn

AgainRow = dict[str, Any]


def redrawn_row(found: RedrawnStep) -> AgainRow:
    """Return what came of sampling a step's samples again."""
    record, first = found.record, found.first_other
    return {
        "run": record.run, "step": record.step, "iteration": record.iteration, "equal": found.equal,
        "as_expected": found.as_expected, "samples": len(found.samples),
        "samples_equal": sum(one.equal for one in found.samples),
        "tokens": sum(int(one.sample.tokens.size) for one in found.samples),
        "first_other": None if first is None else redrawn_sample_row(first), "apart": found.apart,
        "cache_anew": {one.sample.id: list(one.anew) for one in found.samples if one.anew},
        "tolerance": found.tolerance, "made_on": record.made_on, "here": kind_of_machine(),
        "others": [redrawn_sample_row(one) for one in found.samples if not one.equal],
    }  # fmt: skip


def redrawn_sample_row(found: Redrawn) -> AgainRow:
    """Return where a sample that was sampled again differs, and by how much."""
    place, sample, answer = found.first_other, found.sample, found.answer
    row: AgainRow = {
        "sample": sample.id, "equal": found.equal, "token": place, "tokens": int(sample.tokens.size),
        "tokens_found": int(answer.tokens.size), "finish": sample.finish, "finish_found": answer.finish,
        "same_tokens": found.same_tokens, "apart": found.apart, "versions": sample.versions.tolist(),
        "version_starts": sample.version_starts.tolist(), "generator": sample.generator,
    }  # fmt: skip
    if place is not None:
        for end, one in (("", sample), ("_found", answer)):
            there = place < one.tokens.size
            row[f"token_id{end}"] = int(one.tokens[place]) if there else None
            row[f"logprob{end}"] = float(one.logprobs[place]) if there else None
    return row


def rescored_row(found: RescoredStep) -> AgainRow:
    """Return what came of computing a step's rewards again."""
    record = found.record
    others = [one for one in found.samples if not one.equal]
    return {
        "run": record.run, "step": record.step, "iteration": record.iteration, "equal": found.equal,
        "samples": len(found.samples), "samples_equal": len(found.samples) - len(others),
        "code": found.code.where, "code_changed": found.code.changed,
        "others": [rescored_sample_row(one) for one in others],
    }  # fmt: skip


def rescored_sample_row(found: Rescored) -> AgainRow:
    """Return how a sample's reward differs, part by part."""
    sample, now = found.sample, found.outcome
    return {
        "sample": sample.id, "problem": sample.problem_id, "reward": _finite(sample.reward),
        "reward_found": _finite(now.total), "parts": dict(sample.reward_parts), "parts_found": now.parts,
        "error": sample.reward_error, "error_found": now.error,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Compares a run that was made with what a profile predicts of it.

A profile adds up parts, and a run is more than its parts. Later predictions are corrected by how far the one
of this run is off, since they leave out the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from flows.planning.profile_file import read_profile
from flows.plans.given_split import given_split
from flows.plans.planning_inputs import planning_inputs
from flows.plans.prediction import expected_step
from flows.view.line_files import METRICS_FILE, lines_of
from infra.errors import Explained
from schemas.importing import BadImport
from schemas.loading import RunFileError
from schemas.runspec import RunSpec

# Iterations that don't count: at first generators are ahead or wait, and at last nothing is drawn ahead.
_FIRST, _LAST = 8, 3
_LEAST = 6  # that count
_ALIKE = 1.5  # times by which lengths may differ: beyond it the run did other work


def pace_of_run(profile: Path, run: Path) -> float:
    """Return the speed of a run over what a profile predicts of it; 1 where they can't be compared.

    `run`: its report folder. The profile may be one of another model or task, or the run too short.
    """
    speed = _measured(list(lines_of(run / METRICS_FILE)))
    if speed is None:
        return 1.0
    rate, answer = speed
    with suppress(Explained, RunFileError, ValidationError, BadImport, OSError, yaml.YAMLError):
        spec = RunSpec.model_validate(yaml.safe_load((run / "run.yaml").read_text()))
        inputs = planning_inputs(spec, profile=profile)
        step_s, _ = expected_step(inputs, given_split(inputs))
        lengths = read_profile(profile).lengths
        if not lengths.answers:
            return 1.0
        expected_answer = float(np.mean(lengths.answers))
        if not 1 / _ALIKE < answer / expected_answer < _ALIKE or not np.isfinite(step_s):
            return 1.0
        prompt = float(np.mean(lengths.prompts)) if lengths.prompts else 0.0
        expected = spec.algorithm.groups * spec.algorithm.group_size / step_s
        return rate * (prompt + answer) / (expected * (prompt + expected_answer))
    return 1.0


def _measured(rows: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Return samples a second and tokens of an answer, of iterations that count; None if those are few."""
    try:
        found = [
            (int(one["iteration"]), float(one["finished_at"]), float(one["samples"]), float(one["tokens"]))
            for one in rows
        ]
    except (KeyError, TypeError, ValueError):
        return None
    last = max((one[0] for one in found), default=0) - _LAST
    counted = [one for one in found if _FIRST <= one[0] <= last]
    begun = [one[1] for one in found if one[0] < _FIRST]
    if len({one[0] for one in counted}) < _LEAST or not begun:
        return None
    seconds = max(one[1] for one in counted) - max(begun)
    samples, tokens = (sum(one[number] for one in counted) for number in (2, 3))
    if not 0 < seconds < float("inf") or min(samples, tokens) <= 0:
        return None
    return samples / seconds, tokens / samples

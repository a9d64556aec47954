"""Inspects a run without starting anything of it: `streamrl run FILE --check`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows.run.inspection.finding import Finding
from flows.run.inspection.model import has_tokenizer, look_at_model
from flows.run.inspection.store_and_broker import look_at_places
from flows.run.inspection.task import look_at_task
from flows.run.start_model import model_at_hand
from schemas.runspec import RunSpec

__all__ = ["Finding", "inspect_run"]


def inspect_run(spec: RunSpec, told: Sequence[str] = ()) -> list[Finding]:
    """Return all findings that are not in `told`. A task that is wrong in `told` is not imported."""
    model = model_at_hand(spec)
    tokenizer = model if model is not None and has_tokenizer(model) else None
    no_task = any(problem.startswith("task.") for problem in told)
    found = [
        *_model(spec, model),
        *([] if no_task else look_at_task(spec, tokenizer)),
        *look_at_places(spec),
    ]
    return [one for one in found if not any(one.said in problem for problem in told)]


def _model(spec: RunSpec, folder: Path | None) -> list[Finding]:
    if folder is not None:
        return list(look_at_model(folder))
    if spec.model.build:
        return [Finding("model", f"{spec.model.build} is not built yet: a run builds it")]
    return []  # it is told already that there is no such folder

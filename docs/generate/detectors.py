"""The page about the detectors of `streamrl explain`."""

from __future__ import annotations

from flows.explain.explanation import DETECTORS
from schemas.stages import MEANINGS, tolerances

_HEAD = """# Detectors

[`streamrl explain`](../how-to/explain-a-run.md) looks at a run with these detectors, in this order. Each is
tried on [planted faults](../how-to/explain-a-run.md#the-bug-zoo), and on healthy runs, in which none may find
anything.

| detector | the failure that it is for | it compares |
|---|---|---|
"""
_STAGES = """
## Stages of a step

The ledger has a digest of each stage, so that [a replay](../how-to/debug-a-step.md#take-a-step-again) names
the first one that differs. On another kind of machine a stage may differ by its tolerance, which is in the
step's record.

| stage | it computes | apart is measured as | tolerance in float32 | in bfloat16 |
|---|---|---|---|---|
"""


def detectors_page() -> str:
    """Return the page."""
    rows = [f"| {one.name} | {one.failure} | {one.how} |" for one in DETECTORS]
    plain, short = tolerances("float32"), tolerances("bfloat16")
    stages = [
        f"| {stage.title} | {one.computes} | {one.unit} | {plain[stage]:g} | {short[stage]:g} |"
        for stage, one in MEANINGS.items()
    ]
    return _HEAD + "\n".join(rows) + "\n" + _STAGES + "\n".join(stages)

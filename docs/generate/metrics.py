"""The page about metrics."""

from __future__ import annotations

from schemas.metrics import METRICS

_HEAD = """# Metrics

Each optimizer step has these metrics. They are in `metrics.jsonl` of the run's folder, one line a step,
while the run goes on; [trackers](../extending/tracker.md) and [`run.metrics()`](../python.md) give the
same. A value that is not known or not finite is null. [The page of the run](../how-to/report.md)
draws all of them.

| metric | unit | meaning | in a run that is well | if not |
|---|---|---|---|---|
"""


def metrics_page() -> str:
    """Return the page."""
    rows = [
        f"| `{name}` | {one.unit} | {one.meaning} | {one.healthy} | {one.otherwise} |"
        for name, one in METRICS.items()
    ]
    return _HEAD + "\n".join(rows)

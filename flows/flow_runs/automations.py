"""Automations at a Prefect server keep the states of our flow runs true when a process or a machine dies.

A flow run says once a minute that it is alive (`flows.flow_runs.watching`). One that goes silent without an
end was killed: an automation calls it crashed. One that dies while it is cancelled is called cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ALIVE = "streamrl.flow-run.alive"  # the event that a flow run sends
ENDED = "streamrl.flow-run.ended"  # the event that it sends last, unless it is killed
DEAD_AFTER_S = 180.0  # three times the interval at which it does
CANCELLING_S = 300.0  # more than any flow run takes to end its processes
FLOWS = (
    "train", "sync-weights", "join-run", "rebalance", "refresh-ranker", "archive-run", "keyframe", "verify",
    "collect", "promote",
)  # fmt: skip
_ENDS = [
    f"prefect.flow-run.{state}"
    for state in ("Completed", "Failed", "TimedOut", "Crashed", "Cancelled", "Suspended", "AwaitingRetry")
]

Call = Callable[[str, dict[str, Any]], Any]  # path, body → answer


def ensure_automations(call: Call, *, silent_s: float = DEAD_AFTER_S) -> None:
    """Make the automations that are not there. `call` posts to the server, and returns its answer."""
    for wanted in _automations(silent_s):
        found = call("/automations/filter", {"automations": {"name": {"any_": [wanted["name"]]}}})
        if not found:
            call("/automations/", wanted)


def _automations(silent_s: float) -> list[dict[str, Any]]:
    return [
        _automation(
            "StreamRL: a flow run that died is crashed", [ALIVE], [ALIVE, ENDED, *_ENDS], silent_s, "CRASHED",
            "Its process was killed, or its machine died: nothing was heard of it any more. A retry goes on "
            "with its run.",
        ),
        _automation(
            "StreamRL: a flow run that died while it was cancelled is cancelled",
            ["prefect.flow-run.Cancelling"], _ENDS, CANCELLING_S, "CANCELLED",
            "Cancelled. Nothing was heard of its process any more.",
        ),
    ]  # fmt: skip


def _automation(
    name: str, after: list[str], expected: list[str], within_s: float, state: str, message: str
) -> dict[str, Any]:
    return {
        "name": name,
        "description": "Made by `streamrl up`, `run` or `deploy`.",
        "enabled": True,
        "trigger": {
            "type": "event",
            "posture": "Proactive",
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)},
            "for_each": ["prefect.resource.id"],
            "after": after,
            "expect": expected,
            "threshold": 1,
            "within": within_s,
        },
        "actions": [{"type": "change-flow-run-state", "state": state, "message": message}],
    }

"""How a role refuses records that every process of the run reads."""

from __future__ import annotations

from infra.gate import Refuse
from infra.roles.context import RoleContext


def refusal(context: RoleContext) -> Refuse:
    """Return a refusal that writes a dead letter in generator 0, and only logs in all other processes."""
    if (context.role, context.number) == ("generator", 0):
        return context.dead_letter
    return lambda record, reason: context.log.warning("%s is passed over: %s", record.place, reason)

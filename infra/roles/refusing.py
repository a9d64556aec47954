"""The way in which a role refuses records that every process of the run reads."""

from __future__ import annotations

from infra.gate import Refuse
from infra.roles.context import RoleContext


def refusal(context: RoleContext) -> Refuse:
    """The first generator reports such a record for all; every other process only logs it."""
    if (context.role, context.instance) == ("generator", 0):
        return context.dead_letter
    return lambda record, reason: context.log.warning("%s is passed over: %s", record.place, reason)

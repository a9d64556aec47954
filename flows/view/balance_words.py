"""Says in words how the number of generators was changed."""

from __future__ import annotations

from schemas.messages import BalanceRecord


def balance_in_words(one: BalanceRecord) -> str:
    """Return a change, or a recommendation of one, as a line for people."""
    does = "should have" if one.dry else "gets"
    return (
        f"balance: after iteration {one.iteration} the run {does} {generators_in_words(one.after)} rather "
        f"than {one.before}: {one.reason}"
    )


def generators_in_words(count: int) -> str:
    """Return a number of generators in words."""
    return f"{count} generator" if count == 1 else f"{count} generators"

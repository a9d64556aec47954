"""Says in words how the number of generators was changed."""

from __future__ import annotations

import time

from schemas.messages import BalanceRecord


def balance_in_words(one: BalanceRecord) -> str:
    """Return a change, or a recommendation of one, as a line for people."""
    does = "should have" if one.dry else "gets"
    return (
        f"balance: after iteration {one.iteration} the run {does} {generators_in_words(one.after)} rather "
        f"than {one.before}: {one.reason}"
    )


def verdict_in_words(iteration: int, before: int, after: int, reason: str) -> str:
    """Return a verdict that nobody has acted on, as a line for people."""
    if before == after:
        return f"after iteration {iteration}, {generators_in_words(before)} should stay: {reason}"
    should = f"there should be {generators_in_words(after)} rather than {before}"
    return f"after iteration {iteration} {should}: {reason}"


def balance_row(one: BalanceRecord) -> dict[str, str]:
    """Return a change as a row of a table, by column."""
    return {
        "iteration": str(one.iteration),
        "generators": f"{one.before} → {one.after}{' (dry)' if one.dry else ''}",
        "generating": f"{one.gen_s:.1f} s",
        "training": f"{one.train_s:.1f} s",
        "one more saves": f"{one.gain_s:.1f} s",
        "why": one.reason,
        "decided by": one.decided_by,
        "at": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.decided_at)),
    }


def generators_in_words(count: int) -> str:
    """Return a number of generators in words."""
    return f"{count} generator" if count == 1 else f"{count} generators"

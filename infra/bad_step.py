"""Errors about unusable ledger records: one stops a run only if it may be a step that the run needs."""

from __future__ import annotations

from infra.bus import Record
from infra.errors import Explained
from infra.stores.store import Store

_DIGITS = 9  # digits of the largest step number


class BadStep(Explained):
    """A ledger record can't be used, and without it nobody knows what was trained."""

    lasting = True


def claimed_step(record: Record) -> int:
    """Return the step that a record's key names, or -1 if the key names none."""
    return int(record.key) if record.key.isdigit() and len(record.key) <= _DIGITS else -1


def bad_step(record: Record, reason: str, run: str, store: Store) -> BadStep:
    """Return the error that names a ledger record and says how the run can go on past it."""
    return BadStep(
        f"{record.place} can't be used: {reason}. It may be step {claimed_step(record)} of this run, and "
        "without that step nobody knows what was trained. If it is no step, or if you give the step up, run: "
        f"streamrl skip {run} '{record.place}' --store {store.url}"
    )

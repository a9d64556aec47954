"""A record of a ledger that can't be used: it stops a run only if it may be a step that the run needs."""

from __future__ import annotations

from infra.bus import Record
from infra.errors import Explained
from infra.stores.store import Store

_DIGITS = 9  # of the greatest number of a step


class BadStep(Explained):
    """A record of the ledger that can't be used, and without which nobody knows what was trained."""


def claimed_step(record: Record) -> int:
    """The step that a record's key names; -1 if it names none."""
    return int(record.key) if record.key.isdigit() and len(record.key) <= _DIGITS else -1


def bad_step(record: Record, reason: str, run: str, store: Store) -> BadStep:
    """The error that names a record and says how a run goes on past it."""
    return BadStep(
        f"{record.place} can't be used: {reason}. It may be step {claimed_step(record)} of this run, so "
        "nobody knows what was trained then. If it is none, or is to be given up: "
        f"streamrl skip {run} '{record.place}' --store {store.url}"
    )

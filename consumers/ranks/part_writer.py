"""Writes a rank's parts of checkpoints beside its training."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor

from consumers.learners import collective
from consumers.learners.snapshot import Abandoned, PartPlace, StateSnapshot
from consumers.steps.checkpoint import Checkpoints
from consumers.steps.state_parts import write_part
from infra.errors import Explained
from infra.keys import ring_from_env
from infra.stores.opening import open_store
from infra.stores.store import Store
from infra.stores.store_identity import check_identity


class PartWriter:
    """Writes one part after the other. An error ends this process, and so all ranks."""

    def __init__(self, log: logging.Logger, store: str | None = None) -> None:
        """`store`: the store's URL on this machine, if not as rank 0 has it."""
        self._log, self._store = log, store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="part")

    def checkpoints(self, place: PartPlace) -> Checkpoints:
        """Return the checkpoints that a place is among."""
        return Checkpoints(self._opened(place), place.run)

    def _opened(self, place: PartPlace) -> Store:
        store = open_store(self._store or place.store)
        check_identity(store, place.store_id)
        return store

    def begin(self, state: StateSnapshot, place: PartPlace | None) -> None:
        """Write a part; without a place nobody wants it."""
        if place is None:
            state.abandon()
            return
        self._thread.submit(self._write, state, place)

    def _write(self, state: StateSnapshot, place: PartPlace) -> None:
        try:
            write_part(self._opened(place), place, collective.rank_number(), state, ring_from_env())
        except Abandoned:
            pass
        except BaseException as error:
            said = f"this rank can't write its part of the checkpoint of iteration {place.iteration}"
            if isinstance(error, Explained):
                self._log.error("%s: %s", said, error)
            else:
                self._log.exception("%s", said)
            os._exit(1)  # the main thread computes, and may wait for ranks that wait for this one

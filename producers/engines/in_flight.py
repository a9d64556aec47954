"""Batches that vLLM has begun and not taken in: with asynchronous scheduling there is one between two steps.

step: schedule batch n + 1 ──► the GPU has it in its queue ──► wait for batch n ──► its tokens

So the GPU never waits for Python. Work that may only be done between two tokens drains the queue first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class InFlight:
    """The queue of batches of one vLLM engine in this process."""

    def __init__(self, engine: Any) -> None:
        """`engine`: vLLM's LLMEngine."""
        self._engine, self._core = engine, engine.engine_core.engine_core

    @property
    def count(self) -> int:
        """The batches that are under way; always 0 without asynchronous scheduling."""
        return len(self._core.batch_queue or ())

    @property
    def fills(self) -> bool:
        """Whether the next step only begins a batch, and returns before it is done."""
        return self._core.batch_queue is not None and not self._core.batch_queue

    def drain(self) -> Iterator[list[Any]]:
        """Take in the batches that are under way, and begin none. Return vLLM's outputs of each."""
        scheduler = self._core.scheduler
        while self.count:
            # vLLM schedules in each step if it has requests. A paused scheduler would begin an empty batch,
            # for which the runner forgets all rows.
            scheduler.has_requests = lambda: False
            try:
                outputs = self._engine.step()
            finally:
                del scheduler.has_requests
            yield outputs

"""Stands in for vLLM with asynchronous scheduling: a step begins a batch, and returns the one before.

What a GPU computes comes late: logprobs are NaN until their batch is taken in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from producers.engines.open_requests import Arrival, OpenRequests
from producers.engines.sampler import StreamSampler

END, VOCABULARY, LONGEST = 1, 6, 40
LOGITS = torch.randn(5, LONGEST, VOCABULARY, generator=torch.Generator().manual_seed(3))  # by version, token


class LateCopy:
    """A copy that comes when its batch is taken in."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self.copy = values, torch.full_like(values, torch.nan)
        self.came = self.waited_for = False

    def query(self) -> bool:
        return self.came

    def synchronize(self) -> None:
        self.waited_for |= not self.came
        self.come()

    def come(self) -> None:
        if not self.came:
            self.copy.copy_(self._values)
            self.came = True


@dataclass
class Asked:
    """A request, as vLLM's scheduler has it."""

    request_id: str
    max_tokens: int
    before: int  # of the prompt's tokens: those that other engines drew
    output_token_ids: list[int] = field(default_factory=list)
    num_output_placeholders: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def ahead(self) -> int:
        return self.num_output_tokens + self.num_output_placeholders


class Waiting:
    """The part of vLLM's scheduler that is asked."""

    def __init__(self) -> None:
        self.requests: dict[str, Asked] = {}

    def has_requests(self) -> bool:
        return bool(self.requests)


class QueuedVllm:
    """One engine, with the sampler that it calls. `queued`: whether it schedules asynchronously."""

    def __init__(self, *, queued: bool, prompt: int) -> None:
        self.copies: list[LateCopy] = []
        self.sampler = StreamSampler(requests=OpenRequests(self._fetch))
        self.scheduler, self.version, self._prompt, self._number = Waiting(), 0, prompt, 0
        self._arrived = 0.0
        self.core = SimpleNamespace(batch_queue=deque(maxlen=2) if queued else None, scheduler=self.scheduler)
        self.engine_core = SimpleNamespace(engine_core=self.core)
        self.input_batch = SimpleNamespace(req_ids=[], req_output_token_ids=[])

    def _fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Arrival | None]:
        self.copies.append(LateCopy(values))
        return self.copies[-1].copy, self.copies[-1]

    def add_request(self, name: str, prompt: Any, params: int, arrival_time: float, priority: int) -> None:
        assert arrival_time > self._arrived, "no clock decides which of two samples came first"
        self._arrived = arrival_time
        self._number += 1
        internal = f"{name}-{self._number:08d}"
        before = len(prompt["prompt_token_ids"]) - self._prompt
        self.scheduler.requests[internal] = Asked(internal, params, before)

    def abort_request(self, names: Sequence[str]) -> None:
        for internal in [one for one in self.scheduler.requests if one[:-9] in names]:
            del self.scheduler.requests[internal]

    def step(self) -> list[Any]:
        queue = self.core.batch_queue
        if self.scheduler.has_requests():
            batch = self._begin()
            if queue is None:
                return self._end(*batch)
            queue.appendleft(batch)
            if len(queue) < 2:
                return []
        elif not queue:
            return []
        return self._end(*queue.pop())

    def _begin(self) -> tuple[list[Asked], list[int], LateCopy | None]:
        rows = [one for one in self.scheduler.requests.values() if one.ahead < one.max_tokens]
        self.input_batch.req_ids = [one.request_id for one in rows]
        self.input_batch.req_output_token_ids = [[-1] * one.ahead for one in rows]
        if not rows:
            return [], [], None
        logits = torch.stack([LOGITS[self.version, one.before + one.ahead] for one in rows])
        tokens, _ = self.sampler(logits, {}, None, None)
        for one in rows:
            one.num_output_placeholders += 1
        return rows, tokens.tolist(), self.copies[-1]

    def _end(self, rows: list[Asked], tokens: list[int], copy: LateCopy | None) -> list[Any]:
        if copy:
            copy.come()
        outputs = []
        for one, token in zip(rows, tokens, strict=True):
            if one.request_id not in self.scheduler.requests:
                continue  # it ended, or was dropped, while the batch was under way
            one.num_output_placeholders -= 1
            one.output_token_ids.append(token)
            finish = "stop" if token == END else "length" if one.num_output_tokens == one.max_tokens else None
            if finish:
                del self.scheduler.requests[one.request_id]
            drawn = SimpleNamespace(token_ids=list(one.output_token_ids), finish_reason=finish)
            outputs.append(
                SimpleNamespace(request_id=one.request_id[:-9], finished=finish is not None, outputs=[drawn])
            )
        return outputs
